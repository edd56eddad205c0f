"""The Trainer's command lines: ``ZeroCLI``, for scripts, and that of ``lightning-zero plan``."""

from __future__ import annotations

import importlib
import re
import sys
from argparse import SUPPRESS
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.trainer.cli_texts import PLAN, in_one_line, no_strategy, refused_by_the_class
from lightning_zero.trainer.planner import DEFAULT_STRATEGY, Planner, add_plan_options

__all__ = ["PlanCLI", "ZeroCLI", "plan_command"]

_CLASS = re.compile(r"--(model|data|data\.class_path|optimizer|lr_scheduler)(=|$)")


class OneLineParser(LightningArgumentParser):
    """``LightningArgumentParser`` whose errors are one line, without the usage: that names a hundred options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, and exit with 2. What jsonargparse catches, in parsers of its own, stays as it is."""
        if self.exit_on_error:
            parser = getattr(ex, "subcommand_parser", None) or self
            parser.usage = SUPPRESS
            message = in_one_line(message, parser._options_of, StrategyRegistry.available_strategies())
        super().error(message, ex)

    def _options_of(self, path: str) -> list[str]:
        """The names that this parser knows, or (of a path) a class's arguments; none where those cannot be found."""
        parser = LightningArgumentParser(exit_on_error=False) if path else self
        module, _, name = path.rpartition(".")
        with suppress(Exception):  # this is about another error
            parser.add_class_arguments(getattr(importlib.import_module(module), name), fail_untyped=False)
        names = [name[2:] for action in parser._actions for name in action.option_strings if name.startswith("--")]
        return [name for name in names if not name.endswith(("help", "help-all", "+"))]


class ZeroCLI(LightningCLI):
    """``LightningCLI`` with the ZeRO strategies registered and ``zero3`` as the default strategy.

    Takes what ``LightningCLI`` takes; ``trainer_defaults`` and the configuration override the default strategy. An
    option or a setting that does not exist ends the program with one line that names it, and what may have been meant.
    """

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make the parser, which says errors in one line unless ``parser_class`` is another."""
        if self.parser_class is LightningArgumentParser:
            self.parser_class = OneLineParser
        parser = super().init_parser(**kwargs)
        parser.add_argument("--help-all", action="help", help="Show this help.")
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what ``LightningCLI`` adds."""
        self.trainer_defaults = {"strategy": DEFAULT_STRATEGY, **self.trainer_defaults}
        super().add_core_arguments_to_parser(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, or the process's own: a class may stand before and behind a configuration with its arguments.

        Raises SystemExit for wrong options.
        """
        commands = self.subcommands()
        if args is None:  # given to `parse_args` as a list, they would count as a script's own
            self.config = parser.parse_args(_classes_first(sys.argv[1:], commands))
        else:
            super().parse_arguments(
                parser, args if isinstance(args, dict | Namespace) else _classes_first(args, commands)
            )

    def instantiate_classes(self) -> None:
        """Make what is configured. Raises SystemExit for a strategy that does not exist, or that refuses a setting."""
        self._check_strategy()
        try:
            super().instantiate_classes()
        except ValueError as error:
            if (refusal := refused_by_the_class(str(error))) is None:
                raise  # what the user's classes raise is theirs
            self.parser.error(refusal)

    def _check_strategy(self) -> None:
        command, names = self.config.get("subcommand"), StrategyRegistry.available_strategies()
        strategy = self.config.get(f"{command}.trainer.strategy" if command else "trainer.strategy")
        if isinstance(strategy, str) and strategy.lower() not in ("auto", *names):
            self.parser.error(no_strategy(strategy, names))


def plan_command(args: Sequence[str]) -> str:
    """What ``lightning-zero plan`` prints; ``args`` without these two words, where they need Lightning.

    Raises SystemExit for options that do not exist, and as ``Planner``.
    """
    return PlanCLI(
        args=list(args),
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        load_from_checkpoint_support=False,
        parser_kwargs={"prog": "lightning-zero plan", "description": PLAN},
    ).planner.report()


class PlanCLI(ZeroCLI):
    """Shows how a model would be split; ``PLAN`` says what of. Nothing is trained or allocated."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the trainer's arguments and the model's; data may be configured in any way."""
        parser.add_lightning_class_args(Trainer, "trainer")
        defaults = {"strategy": DEFAULT_STRATEGY, **self.trainer_defaults}
        parser.set_defaults({f"trainer.{key}": value for key, value in defaults.items()})
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True, required=False)
        parser.add_argument("--data", type=dict[str, Any] | str | None, default=None, help="Only to be measured with.")
        for name in ("ckpt_path", "weights_only"):  # which `fit` has, and so a run's saved configuration
            parser.add_argument(f"--{name}", type=Any, default=None, help="Not looked at.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what describes the model and the machine, and the settings of the plan."""
        add_plan_options(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, the command line without the word ``plan``.

        ``LightningCLI`` does the same with a warning about ``sys.argv``, which holds that word too. A seed would be set
        for nothing: nothing is initialised.
        """
        if isinstance(args, dict | Namespace):
            self.config = parser.parse_object(args)
        else:
            args = [re.sub(r"^--data(?==\w|$)", "--data.class_path", arg) for arg in args or ()]
            self.config = parser.parse_args(_classes_first(args, ()))
        self.config["seed_everything"] = False

    def instantiate_classes(self) -> None:
        """Make the planner. Raises SystemExit for a strategy that does not exist, and as ``Planner``."""
        self._check_strategy()
        self.planner = Planner(self.config, self.parser)


# --------------------------------------------------------------------------------------------------- what is configured


def _classes_first(args: Sequence[str], commands: Collection[str]) -> list[str]:
    """The command line with the classes of model, data, optimizer and schedule in front too, behind the command.

    A configuration may have arguments of a class that only the command line names. Their class has to be known before
    they are read; what comes last still wins.
    """
    begin = 1 + next(
        (i for i, arg in enumerate(args) if arg in commands and not re.match("--[^=]+$", args[i - 1] if i else "")), -1
    )
    named: list[str] = []
    for index, arg in enumerate(args):
        if _CLASS.match(arg):
            named += args[index : index + (1 if "=" in arg else 2)]
    return [*args[:begin], *named, *args[begin:]]
