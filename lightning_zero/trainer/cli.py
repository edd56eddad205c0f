"""``ZeroCLI``: the Trainer's command line, for scripts and for ``lightning-zero fit``."""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections.abc import Iterable
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.errors import did_you_mean

__all__ = ["DEFAULT_STRATEGY", "ZeroCLI"]

DEFAULT_STRATEGY = "zero3"

_REASON = re.compile(r"^ *- (?!Expected |Does not validate )(.+)$", re.MULTILINE)


class _BriefParser(LightningArgumentParser):
    """``LightningArgumentParser`` whose errors come without the usage: that names a hundred options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error:
            (getattr(ex, "subcommand_parser", None) or self).usage = SUPPRESS
            if re.search(r"are required: (\w+\.)?model$", message):
                message += ". Nothing says which class the model is of: give it, as in --model my_module.MyModel."
        super().error(message, ex)


class ZeroCLI(LightningCLI):
    """``LightningCLI`` with the ZeRO strategies registered and ``zero3`` as the default strategy.

    Takes what ``LightningCLI`` takes; ``trainer_defaults`` and the configuration override the default strategy. A
    strategy that does not exist, or that refuses a setting, ends the program with one line.
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

    def instantiate_classes(self) -> None:
        """Make what is configured. Raises SystemExit for a strategy that does not exist, or that refuses a setting."""
        self._check_strategy()
        try:
            super().instantiate_classes()
        except ValueError as error:
            reason = _REASON.search(str(error))
            if reason is None or "\nGiven value: " not in str(error) or "class_path='lightning_zero." not in str(error):
                raise  # what the user's classes raise is theirs
            self.parser.error(f"trainer.strategy: {reason[1]}")

    def _check_strategy(self) -> None:
        command, names = self.config.get("subcommand"), StrategyRegistry.available_strategies()
        strategy = self.config.get(f"{command}.trainer.strategy" if command else "trainer.strategy")
        if isinstance(strategy, str) and strategy.lower() not in ("auto", *names):
            self.parser.error(_no_strategy(strategy, names))


def _no_strategy(found: str, registered: Iterable[str]) -> str:
    """What to say of a strategy that is none of those that are ``registered``."""
    names = ["auto", *registered]
    ours = ", ".join(name for name in names if re.match("zero[0-9](?!.*-)", name))  # without other spellings
    theirs = ", ".join(name for name in names if "_" not in name and not name.startswith("zero"))
    meant = did_you_mean(found, names)
    return f"trainer.strategy: there is no strategy {found!r}.{meant} There are {ours}, and Lightning's {theirs}, ..."
