"""The Trainer's command lines: ``ZeroCLI``, for scripts, and ``lightning-zero plan``: how a model would be split, what
every stage would take, and which one to choose."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
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

from lightning_zero.analysis import ADAM, MemoryEstimate, OptimizerCost, ZeroPlan, build_plan, estimate_memory
from lightning_zero.analysis.links import Way, describe_ways, fastest_way, parse_speed, ways_to_send
from lightning_zero.checkpoint.consolidate import parse_size
from lightning_zero.comm import Compression
from lightning_zero.comm.groups import shard_span
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement, Stage, Tier
from lightning_zero.session.huggingface import model_of_config
from lightning_zero.session.settings import SessionSettings
from lightning_zero.trainer.cli_texts import PLAN, PLAN_OPTIONS, in_one_line, no_strategy, refused_by_the_class
from lightning_zero.trainer.precision import PrecisionName, ZeroPrecision

__all__ = ["PlanCLI", "ZeroCLI", "plan_command"]

DEFAULT_STRATEGY = "zero3"

# Short names that the Trainer takes too.
_PRECISIONS: Mapping[str, PrecisionName] = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "None": "32-true",
}


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
        parser.add_argument("--data", type=dict[str, Any] | str | None, default=None, help="Not looked at.")
        for name in ("ckpt_path", "weights_only"):  # which `fit` has, and so a run's saved configuration
            parser.add_argument(f"--{name}", type=Any, default=None, help="Not looked at.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what describes the model and the machine, and the settings of the plan."""

        types = {"stage": Stage, "world_size": PositiveInt, "bucket_mib": PositiveFloat, "prefetch": NonNegativeInt}
        types |= {"units": list[str], "offload": Literal["host", "nvme", "none"]}
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
            self.config = parser.parse_args(_class_first(list(args or ())))
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
            self.settings, self.exchange, self.asked = _plan_settings(self.config)
            precision = _precision(self.config.trainer)
            self.memory = _memory(self.config, self.settings["world_size"])
            self.speeds = [_parsed(self.config, f"link_{name}", parse_speed) for name in ("between", "within")]
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
            return OptimizerCost.of(cls, **_arguments(configured))
        if not isinstance(self.model, LightningModule):
            return None
        try:
            with self._attached(self.model), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = list(_optimizers_in(self.model.configure_optimizers()))
        except Exception:  # the user's code, which may ask for more of a Trainer, or for data
            return None
        return OptimizerCost.of(max(made, key=_numel)) if made else None

    @contextmanager
    def _attached(self, model: LightningModule) -> Iterator[None]:
        """On the meta device, with a stand-in for the Trainer that answers what most models ask of one."""
        trainer, names = self.config.trainer, ("max_epochs", "max_steps", "accumulate_grad_batches", "num_nodes")
        # Mostly for schedules, of which nothing counts here.
        steps = trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else 1_000
        answers = {"estimated_stepping_batches": steps, "global_step": 0, "current_epoch": 0}
        model.trainer = SimpleNamespace(  # type: ignore[assignment]
            **{name: trainer[name] for name in names}, **answers, world_size=self.settings["world_size"]
        )
        try:
            with torch.device("meta"):
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
        if self.model is None:
            settings = {name: settings[name] for name in ("world_size", "param_dtype", "reduce_dtype")}
        trainer = self.config.trainer
        on_host, nodes = trainer.accelerator == "cpu", trainer.num_nodes
        with _said_in_one_line():
            return estimate_memory(
                self.config.parameters if self.model is None else self.model,
                optimizer=self.optimizer,
                dtype=self.dtype,
                accelerator=not on_host,
                receive_buffer=on_host and nodes > 1,
                hosts=nodes,
                **(self.exchange if exchange is None else exchange),
                micro_steps=trainer.accumulate_grad_batches,
                **settings,
            )

    def ways(self) -> list[Way]:
        """What links and memory a step takes, for every way to send what it sends."""
        world_size = self.settings["world_size"]
        ranks = world_size // self.config.trainer.num_nodes
        node = ranks if 1 < ranks < world_size else None
        spans = dict.fromkeys((None, node, self.exchange["shard_within"]))
        exchanges: list[dict[str, Any]] = [{"shard_within": span} for span in spans]
        exchanges += [{"secondary_shards": True}] if node and self.config.trainer.accelerator == "cpu" else []
        return ways_to_send([self.estimate(exchange) for exchange in exchanges], self.memory, self.speeds)

    def numbers(self) -> dict[str, Any]:
        """What ``describe`` says, in bytes and seconds; docs/planner.md has the keys."""
        estimate, ways = self.estimate(), self.ways()
        fastest = fastest_way(ways)
        return {
            "plan": None if self.model is None else self.plan().numbers(estimate.micro_steps),
            "estimate": asdict(estimate),
            "recommended": self.memory and asdict(estimate.recommend(**self.memory)),
            "ways": [asdict(way) for way in ways],
            "fastest": fastest and asdict(fastest),
        }

    def describe(self) -> str:
        """The plan, the stages side by side, and what to choose for the given memory."""
        estimate, parts = self.estimate(), []
        if self.model is not None:
            accelerator, steps = estimate.accelerator, estimate.micro_steps
            parts.append(self.plan().describe(optimizer=self.optimizer, accelerator=accelerator, micro_steps=steps))
        advice = None if self.memory is None else estimate.recommend(**self.memory)
        offload = advice is not None and (advice.name is None or advice.name.endswith("_offload"))
        offload = offload or self.settings["offload"] is not None
        parts.append(estimate.describe(offload=offload))
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
    except ValueError as error:
        raise SystemExit(f"lightning-zero plan: error: {error}") from None


# --------------------------------------------------------------------------------------------------- what is configured


def _class_first(args: list[str]) -> list[str]:
    """The command line with the model's class in front too.

    A script that fixes its model's class has configurations with arguments of the model alone: their class has to be
    known before they are read. What comes last still wins.
    """
    for index, arg in enumerate(args):
        if arg.startswith("--model="):
            return [arg, *args]
        if arg == "--model":
            return [*args[index : index + 2], *args]
    return args


def _arguments(configured: Namespace) -> dict[str, Any]:
    """The ``init_args`` of a configured class."""
    return vars(configured.get("init_args") or Namespace())  # type: ignore[no-untyped-call]


def _plan_settings(config: Namespace) -> tuple[dict[str, Any], dict[str, Any], SessionSettings]:
    """Arguments of ``build_plan``, of ``estimate_memory`` for the exchange, and both: options, else the strategy's."""
    strategy, given = config.trainer.strategy, {}
    name = strategy.class_path.rpartition(".")[2] if isinstance(strategy, Namespace) else str(strategy)
    if name.startswith("zero") and name in StrategyRegistry:
        given = StrategyRegistry[name]["init_params"]
    if isinstance(strategy, Namespace) and (given or name == "ZeroStrategy"):
        given = {**given, **_arguments(strategy)}
    names = ("stage", "units", "bucket_mib", "prefetch", "offload", "broadcast_buffers")
    settings = {name: given[name] for name in names if given.get(name) is not None}
    exchange = {name: given[name] for name in ("shard_within", "compression", "secondary_shards") if given.get(name)}
    for name in ("stage", "units", "bucket_mib", "prefetch"):
        if config[name] is not None:
            settings[name] = config[name]
    if "stage" not in settings:
        shown = strategy.class_path if isinstance(strategy, Namespace) else repr(strategy)
        raise ValueError(
            f"trainer.strategy is {shown}, which has no ZeRO stage: give --stage, or --trainer.strategy zero3"
        )
    settings["placement"] = Placement.from_stage(settings.pop("stage"))
    settings["offload"] = _offload(config["offload"], settings.get("offload"), settings["placement"])
    if isinstance(chosen := exchange.get("compression"), Namespace):
        exchange["compression"] = Compression(**vars(chosen.init_args if "class_path" in chosen else chosen))
    asked = SessionSettings(**settings, **exchange)
    world_size = config.world_size or _world_size(config.trainer.devices, config.trainer.num_nodes)
    ranks = world_size // config.trainer.num_nodes
    exchange["shard_within"] = span = shard_span(asked.shard_within, ranks, world_size)
    keeping = ranks if asked.secondary_shards and 1 < ranks < world_size else None
    settings |= {"world_size": world_size, "placement": replace(asked.placement, span=span, keeping=keeping)}
    return settings, exchange, asked


def _offload(asked: str | None, configured: Any, placement: Placement) -> Offload | None:
    """What ``--offload`` asks for, with the settings of ``configured`` where they are of that kind.

    ``configured`` is the strategy's ``offload``: a policy, or what it would be made of.
    """
    policy: Offload | None = configured
    if isinstance(configured, Namespace):
        settings = vars(configured.init_args if "class_path" in configured else configured)
        policy = (NvmeOffload if "path" in settings else HostOffload)(**settings)
    tier = {"host": Tier.HOST, "nvme": Tier.DISK}.get(asked or "")
    if asked is None or (policy is not None and policy.tier is tier):
        return policy
    if tier is Tier.HOST:
        return HostOffload(parameters=placement.shards_parameters)
    if tier is Tier.DISK:
        return NvmeOffload(path=os.curdir, parameters=placement.shards_parameters)  # a plan does not look there
    return None


def _world_size(devices: Any, num_nodes: int) -> int:
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if isinstance(devices, list) and devices:
        devices = len(devices)
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"--world-size is needed: trainer.devices is {devices!r}.")
    return devices * num_nodes


def _precision(trainer: Namespace) -> ZeroPrecision:
    """That of the Trainer's ``precision``, or of a ``ZeroPrecision`` among its plugins."""
    for plugin in trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]:
        if isinstance(plugin, Namespace) and plugin.class_path.rpartition(".")[2] == "ZeroPrecision":
            given = _arguments(plugin)
            names = ("precision", "reduce_dtype", "full_precision")
            return ZeroPrecision(**{name: given[name] for name in names if name in given})
    return ZeroPrecision(_PRECISIONS.get(str(trainer.precision), trainer.precision))


def _memory(config: Namespace, world_size: int) -> dict[str, Any] | None:
    """What there is, as ``recommend`` takes it; ``None`` if that is not said."""
    device, host, activations = (_parsed(config, name) for name in ("device_memory", "host_memory", "activations"))
    if device is None and host is not None and config.trainer.accelerator == "cpu":
        device = host * config.trainer.num_nodes // world_size  # a rank's share of what is device and host in one
    if device is None and (host or activations):
        raise ValueError("--host-memory and --activations need --device-memory beside them, for example 80GB.")
    return device and {"device_nbytes": device, "host_nbytes": host, "activations_nbytes": activations or 0}


def _parsed(config: Namespace, name: str, parse: Callable[[str], Any] = parse_size) -> Any:
    """Bytes of an option, or bytes a second."""
    try:
        return None if config[name] is None else parse(config[name])
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')}: {error}") from None


def _optimizers_in(found: Any) -> Iterator[Optimizer]:
    """What ``configure_optimizers`` returns has many forms."""
    if isinstance(found, Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from _optimizers_in(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _optimizers_in(part)


def _numel(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
