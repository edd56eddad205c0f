"""The command line of ``lightning-zero plan`` where it needs Lightning: it knows every option of ``fit``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_zero.extensions.planner.command import Planner, add_plan_options
from lightning_zero.extensions.planner.options import WHAT
from lightning_zero.trainer.cli import DEFAULT_STRATEGY, ZeroCLI

__all__ = ["PlanCLI", "planner_of"]


def planner_of(args: Sequence[str]) -> Planner:
    """The planner of a command line without its first two words. Raises SystemExit for options that do not exist, and
    as ``Planner``."""
    return PlanCLI(
        args=list(args),
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        load_from_checkpoint_support=False,
        parser_kwargs={"prog": "lightning-zero plan", "description": WHAT},
    ).planner


class PlanCLI(ZeroCLI):
    """Shows how a model would be split; ``WHAT`` says what of. Nothing is trained or allocated."""

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
            self.config = parser.parse_args(args)
        self.config["seed_everything"] = False

    def instantiate_classes(self) -> None:
        """Make the planner. Raises SystemExit for a strategy that does not exist, and as ``Planner``."""
        self._check_strategy()
        self.planner = Planner(self.config, self.parser)
