"""``ZeroCLI``: the Trainer's command line, for scripts and for ``lightning-zero fit``."""

from __future__ import annotations

from argparse import SUPPRESS
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

__all__ = ["DEFAULT_STRATEGY", "ZeroCLI"]

DEFAULT_STRATEGY = "zero3"


class _BriefParser(LightningArgumentParser):
    """``LightningArgumentParser`` whose errors come without the usage: that names a hundred options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error:
            (getattr(ex, "subcommand_parser", None) or self).usage = SUPPRESS
        super().error(message, ex)


class ZeroCLI(LightningCLI):
    """``LightningCLI`` with the ZeRO strategies registered and ``zero3`` as the default strategy.

    Takes the arguments of ``LightningCLI``; ``trainer_defaults`` and the configuration override the default strategy.
    """

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make the parser, whose errors are brief unless ``parser_class`` is another."""
        if self.parser_class is LightningArgumentParser:
            self.parser_class = _BriefParser
        parser = super().init_parser(**kwargs)
        parser.add_argument("--help-all", action="help", help="Show this help.")
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what ``LightningCLI`` adds."""
        self.trainer_defaults = {"strategy": DEFAULT_STRATEGY, **self.trainer_defaults}
        super().add_core_arguments_to_parser(parser)
