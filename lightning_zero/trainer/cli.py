"""``ZeroCLI``: the Trainer's command line, for scripts and for ``lightning-zero fit``."""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

__all__ = ["DEFAULT_STRATEGY", "ZeroCLI"]

DEFAULT_STRATEGY = "zero3"


class ZeroCLI(LightningCLI):
    """``LightningCLI`` with the ZeRO strategies registered and ``zero3`` as the default strategy.

    Takes the arguments of ``LightningCLI``; ``trainer_defaults`` and the configuration override the default strategy.
    """

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what ``LightningCLI`` adds."""
        self.trainer_defaults = {"strategy": DEFAULT_STRATEGY, **self.trainer_defaults}
        super().add_core_arguments_to_parser(parser)
