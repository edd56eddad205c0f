"""The Trainer's command lines: ``ZeroCLI``, for scripts, and ``lightning-zero plan``: how a model would be split, what
every stage would take, and which one to choose."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from argparse import SUPPRESS
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import torch
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.optim import Optimizer

from lightning_zero._torch import tree_leaves
from lightning_zero.activations import ActivationBytes, measure_activations
from lightning_zero.analysis import ADAM, MemoryEstimate, OptimizerCost, ZeroPlan, build_plan, estimate_memory
from lightning_zero.analysis.estimate import Recommendation
from lightning_zero.analysis.links import Way, describe_ways, fastest_way, parse_speed, ways_to_send
from lightning_zero.config import Stage
from lightning_zero.trainer.cli_texts import PLAN, PLAN_OPTIONS, in_one_line, no_strategy, refused_by_the_class
from lightning_zero.trainer.loaders import first_batch
from lightning_zero.trainer.plan_settings import (
    MEASURED,
    arguments_of,
    memory_of,
    model_of_config,
    parsed,
    plan_settings,
    precision_of,
    tokens_for,
)
from lightning_zero.trainer.precision import ZeroPrecision

__all__ = ["PlanCLI", "ZeroCLI", "plan_command"]

DEFAULT_STRATEGY = "zero3"
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
    """What ``lightning-zero plan`` prints; ``args`` without these two words. Raises SystemExit for wrong options."""
    cli = PlanCLI(
        args=list(args),
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        load_from_checkpoint_support=False,
        parser_kwargs={"prog": "lightning-zero plan", "description": PLAN},
    )
    if cli.config.plot is not None:
        cli.draw(cli.config.plot)
    return json.dumps(cli.numbers(), indent=2) if cli.config.json else cli.describe()


class PlanCLI(ZeroCLI):
    """Shows how a model would be split; ``PLAN`` says what of. Nothing is trained or allocated."""

    model: nn.Module | None

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

        types = {"stage": Stage, "world_size": PositiveInt, "bucket_mib": PositiveFloat, "prefetch": NonNegativeInt}
        types |= {"units": list[str], "offload": Literal["host", "nvme", "none"]}
        types |= dict.fromkeys(("batch_size", "sequence_length"), PositiveInt)
        for name, text in PLAN_OPTIONS.items():  # all may be left out, and have their hyphens as hyphens too
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            kind: dict[str, Any] = {"type": types.get(name, str) | None, "default": None}
            parser.add_argument(*spellings, help=text, **({"action": "store_true"} if name == "json" else kind))

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
        """Build the model, on the meta device, and nothing else. Raises SystemExit for a missing or wrong setting."""
        self._check_strategy()
        given = [name for name in ("model", "hf_config", "parameters") if self.config.get(name) is not None]
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            self.parser.error(
                f"one of --model (or a configuration with it), --hf-config, --parameters is needed{found}"
            )
        with _said_in_one_line():
            self.settings, self.exchange, self.asked = plan_settings(self.config)
            precision = precision_of(self.config.trainer)
            self.on_host = self.config.trainer.accelerator == "cpu"
            self.memory = memory_of(self.config, self.settings["world_size"])
            self.speeds = [parsed(self.config, f"link_{name}", parse_speed) for name in ("between", "within")]
            if self.speeds[0] and self.config.trainer.num_nodes == 1:
                raise ValueError("--link-between is between machines, and there is one: give --trainer.num_nodes.")
            self.model = self._module()
            found_optimizer = self._optimizer()
        if self.model is not None:
            self.model = precision.convert_module(self.model)
        converted = precision.convert_module(nn.Linear(1, 1, device="meta"))
        self.dtype = next(iter(converted.parameters())).dtype
        self.optimizer = found_optimizer or ADAM
        self.assumed = found_optimizer is None and isinstance(self.model, LightningModule)
        self.settings |= {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
        self.settings["full_precision"] = precision.full_precision
        with _said_in_one_line():
            self.measured, self.unknown = self._measured(precision, self.settings.pop("activations", None))

    def _module(self) -> nn.Module | None:
        if self.config.hf_config is not None:
            return model_of_config(self.config.hf_config)
        if self.config.model is None:
            return None
        with torch.device("meta"):
            only_model = Namespace(model=self.config.model)  # type: ignore[no-untyped-call]
            model: LightningModule = self.parser.instantiate(only_model).model
        with self._attached(model):
            model.configure_model()
        return model

    def _optimizer(self) -> OptimizerCost | None:
        """The configured one, or the one over most parameters that the model makes; ``None`` if neither is known."""
        configured = self.config.get("optimizer")
        if configured is not None:
            module, _, name = configured.class_path.rpartition(".")
            cls: type = getattr(importlib.import_module(module), name)  # other packages have an Adam, too
            return OptimizerCost.of(cls, **arguments_of(configured))
        if not isinstance(self.model, LightningModule):
            return None
        try:
            with self._attached(self.model), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = tree_leaves(self.model.configure_optimizers())
        except Exception:  # the user's code, which may ask for more of a Trainer, or for data
            return None
        made = [leaf for leaf in found if isinstance(leaf, Optimizer)]
        numels = [sum(p.numel() for group in one.param_groups for p in group["params"]) for one in made]
        return OptimizerCost.of(made[numels.index(max(numels))]) if made else None

    def _measured(self, precision: ZeroPrecision, policy: Any) -> tuple[ActivationBytes | None, str]:
        """Activations, if they are to be measured, and why they are not known. Raises ValueError without a batch."""
        if self.config.activations != MEASURED:
            return None, ""
        settings: Any = {name: self.settings.get(name) for name in ("param_dtype", "full_precision", "units")}
        settings |= {"accelerator": not self.on_host, "policy": policy}
        model, size, length = self.model, self.config.batch_size, self.config.sequence_length
        with ExitStack() as stack:
            if isinstance(model, LightningModule):
                stack.enter_context(self._attached(model, "cpu"))
                batch = precision.convert_input(first_batch(model, self.config.data))
            elif model is None or size is None or length is None:
                raise ValueError(f"--activations {MEASURED} needs --hf-config, --batch-size and --sequence-length.")
            else:
                batch = tokens_for(model, size, length)
            stack.enter_context(precision.tensor_init_context())
            try:
                return measure_activations(model, batch, **settings), ""
            except ValueError as error:
                return None, str(error)

    @contextmanager
    def _attached(self, model: LightningModule, device: str = "meta") -> Iterator[None]:
        """With a stand-in for the Trainer that answers what most models ask of one, and tensors made on ``device``."""
        trainer, names = self.config.trainer, ("max_epochs", "max_steps", "accumulate_grad_batches", "num_nodes")
        # Mostly for schedules, of which nothing counts here.
        steps = trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else 1_000
        answers: dict[str, Any] = {"estimated_stepping_batches": steps, "global_step": 0, "current_epoch": 0}
        answers |= {"global_rank": 0, "is_global_zero": True, "training": True, "logger": None, "loggers": []}
        model.trainer = SimpleNamespace(  # type: ignore[assignment]
            **{name: trainer[name] for name in names}, **answers, world_size=self.settings["world_size"]
        )
        try:
            with torch.device(device):
                yield
        finally:
            model.trainer = None

    def plan(self) -> ZeroPlan:
        """The plan for the model. Raises SystemExit if the settings do not fit it, or there is only a number."""
        with _said_in_one_line():
            if self.model is None:
                raise ValueError("--parameters is a number, of which there is no plan: give the model.")
            plan = build_plan(self.model, **self.settings)
            self.asked.check(plan)
            return plan

    def estimate(self, exchange: Mapping[str, Any] | None = None) -> MemoryEstimate:
        """All stages side by side, with the configured exchange or another. Raises SystemExit if it does not fit."""
        settings = {name: value for name, value in self.settings.items() if name not in ("placement", "offload")}
        settings["activations"] = self.measured and self.measured.total
        if self.model is None:
            settings = {name: settings[name] for name in ("world_size", "param_dtype", "reduce_dtype")}
        nodes, exchange = self.config.trainer.num_nodes, self.exchange if exchange is None else exchange
        alone = self.settings["world_size"] == nodes > 1  # others read one another's memory
        with _said_in_one_line():
            return estimate_memory(
                self.config.parameters if self.model is None else self.model,
                optimizer=self.optimizer,
                dtype=self.dtype,
                accelerator=not self.on_host,
                receive_buffer=self.on_host and (alone or exchange.get("shard_within") is not None),
                hosts=nodes,
                **exchange,
                micro_steps=self.config.trainer.accumulate_grad_batches,
                **settings,
            )

    def ways(self) -> list[Way]:
        """What links and memory a step takes, for every way to send what it sends."""
        world_size = self.settings["world_size"]
        ranks = world_size // self.config.trainer.num_nodes
        node = ranks if 1 < ranks < world_size else None
        spans = dict.fromkeys((None, node, self.exchange["shard_within"]))
        exchanges: list[dict[str, Any]] = [{"shard_within": span} for span in spans]
        exchanges += [{"secondary_shards": True}] if node else []
        return ways_to_send([self.estimate(exchange) for exchange in exchanges], self.memory, self.speeds)

    def numbers(self) -> dict[str, Any]:
        """What ``describe`` says, in bytes and seconds; docs/planner.md has the keys."""
        estimate, ways = self.estimate(), self.ways()
        fastest = fastest_way(ways)
        return {
            "plan": None if self.model is None else self.plan().numbers(estimate.micro_steps),
            "estimate": asdict(estimate),
            "activations": {"unknown": self.unknown} if self.unknown else self.measured and asdict(self.measured),
            "recommended": self.memory and asdict(estimate.recommend(**self.memory)),
            "ways": [asdict(way) for way in ways],
            "fastest": fastest and asdict(fastest),
        }

    def draw(self, path: str) -> None:
        """Write the picture of the stages side by side. Raises SystemExit where that cannot be."""
        estimate, memory = self.estimate(), self.memory or {}
        offload = self._shows_offload(estimate.recommend(**memory) if memory else None)
        with _said_in_one_line():
            estimate.draw(path, device_nbytes=memory.get("device_nbytes"), offload=offload)

    def _shows_offload(self, advice: Recommendation | None) -> bool:
        recommended = advice is not None and (advice.name is None or advice.name.endswith("_offload"))
        return recommended or self.settings["offload"] is not None

    def describe(self) -> str:
        """The plan, the stages side by side, and what to choose for the given memory."""
        estimate, parts = self.estimate(), []
        if self.model is not None:
            accelerator, steps = estimate.accelerator, estimate.micro_steps
            parts.append(self.plan().describe(optimizer=self.optimizer, accelerator=accelerator, micro_steps=steps))
        advice = None if self.memory is None else estimate.recommend(**self.memory)
        offload = self._shows_offload(advice)
        parts.append(estimate.describe(offload=offload))
        parts += [self.unknown] if self.unknown else []
        if self.assumed:
            parts.append("Which optimizer the model makes cannot be told without training it: AdamW is assumed.")
        if advice is not None:
            parts.append(f"Recommended: {advice.name or 'nothing'}. {advice.reason}")
        if any(self.speeds):
            parts.append(describe_ways([way for way in self.ways() if offload or "_offload" not in way.stage]))
        return "\n\n".join(parts)


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    """Wrong settings are for the person at the terminal: no traceback."""
    try:
        yield
    except (ValueError, OSError) as error:  # the latter of a picture that cannot be written there
        raise SystemExit(f"lightning-zero plan: error: {error}") from None


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
