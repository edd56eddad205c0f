"""``lightning-zero plan``: how a model would be split, what every stage would take, and which one to choose."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR_ALIAS_CONVERSION
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero._torch import tree_leaves
from lightning_zero.comm.groups import shard_span
from lightning_zero.config import (
    ActivationPolicy,
    Compression,
    HostOffload,
    NvmeOffload,
    Offload,
    Placement,
    SessionSettings,
    Stage,
    parse_size,
    validate_offload,
)
from lightning_zero.extensions.planner import OPTIONS, WHAT
from lightning_zero.extensions.planner.costs import ADAM, OptimizerCost
from lightning_zero.extensions.planner.estimate import (
    MemoryEstimate,
    estimate_memory,
    plan_numbers,
)
from lightning_zero.extensions.planner.measure import ActivationBytes, first_batch, measure_activations
from lightning_zero.plan.plan import ZeroPlan, build_plan
from lightning_zero.registry import extension
from lightning_zero.trainer.cli import DEFAULT_STRATEGY, ZeroCLI
from lightning_zero.trainer.precision import ZeroPrecision

__all__ = ["MEASURED", "PlanCLI", "Planner", "planner_of", "tokens_for"]

MEASURED = "measured"


class Planner:
    """The plan that a configuration describes, for people and for programs. Nothing is trained or allocated.

    Builds the model, on the meta device, and measures its activations where that is asked for.

    Raises:
        ValueError: if a setting is missing or wrong, or does not fit the model.
        ImportError: if a package is missing that a setting needs.
    """

    def __init__(self, config: Namespace, parser: ArgumentParser) -> None:
        given = [name for name in ("model", "hf_config", "parameters") if config.get(name) is not None]
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            raise ValueError(
                f"one of --model (or a configuration with it), --hf-config, --parameters is needed{found}."
            )
        self.config, self._parser = config, parser
        # "auto" stands for an accelerator, as plans are made for other machines.
        self.on_host = config.trainer.accelerator == "cpu"
        self.settings, self.exchange, self.asked = plan_settings(config)
        self.tensor = self.settings.pop("tensor_parallel_size")
        precision = precision_of(config)
        self.memory = memory_of(config, self.ranks)
        self.model = self._module()
        found_optimizer = self._optimizer()
        if self.model is not None:
            self.model = precision.convert_module(self.model)
        converted = precision.convert_module(nn.Linear(1, 1, device="meta"))
        self.dtype = next(iter(converted.parameters())).dtype
        self.optimizer = found_optimizer or ADAM
        self.assumed = found_optimizer is None and config.model is not None
        self.settings |= {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
        self.settings["full_precision"] = precision.full_precision
        self.measured, self.unknown = self._measured(precision, self.settings.pop("activations", None))

    @property
    def ranks(self) -> int:
        """All of them, where ``settings`` have those with other data."""
        return cast(int, self.settings["world_size"] * self.tensor)

    def _module(self) -> nn.Module | None:
        config, parallel = self.config, self.asked.tensor_parallel_size is not None
        if parallel and config.hf_config is not None:
            raise ValueError("tensor_parallel_size needs --model, not --hf-config.")
        if config.hf_config is not None:
            return model_of_config(config.hf_config)
        if config.model is None:
            return None
        with torch.device("meta"):
            only_model = Namespace(model=config.model)  # type: ignore[no-untyped-call]
            model: LightningModule = self._parser.instantiate(only_model).model
        with self._attached(model):
            if parallel:
                extension("tensor_parallel").plan_alone(model, self.settings["world_size"], self.tensor)
            else:
                model.configure_model()
        return model

    def _optimizer(self) -> OptimizerCost | None:
        """The configured one, or the one over most parameters that the model makes; ``None`` if neither is known."""
        configured = self.config.get("optimizer")
        if configured is not None:
            module, _, name = configured.class_path.rpartition(".")
            cls: type = getattr(importlib.import_module(module), name)  # other packages have an Adam, too
            return OptimizerCost.of(cls, **arguments_of(configured))
        if self.config.model is None:
            return None
        model: Any = self.model
        try:
            choosing = extension("tensor_parallel").choosing
            with self._attached(model), choosing(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = tree_leaves(model.configure_optimizers())
        except Exception:  # the user's code, which may ask for more of a Trainer, or for data
            return None
        made = [leaf for leaf in found if isinstance(leaf, Optimizer)]
        numels = [sum(p.numel() for group in one.param_groups for p in group["params"]) for one in made]
        return OptimizerCost.of(made[numels.index(max(numels))]) if made else None

    def _measured(self, precision: Any, policy: Any) -> tuple[ActivationBytes | None, str]:
        """Activations, if they are to be measured, and why they are not known. Raises ValueError without a batch."""
        if self.config.activations != MEASURED:
            return None, ""
        settings: Any = {name: self.settings.get(name) for name in ("param_dtype", "full_precision", "units")}
        settings |= {"accelerator": not self.on_host, "policy": policy, "autocast": precision.autocast}
        model: Any = self.model
        size, length = self.config.batch_size, self.config.sequence_length
        with ExitStack() as stack:
            if self.config.model is not None:
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
            **{name: trainer[name] for name in names}, **answers, world_size=self.ranks
        )
        try:
            with torch.device(device):
                yield
        finally:
            model.trainer = None

    def plan(self) -> ZeroPlan:
        """The plan for the model. Raises ValueError if the settings do not fit it, or there is only a number."""
        if self.model is None:
            raise ValueError("--parameters is a number, of which there is no plan: give the model.")
        plan = build_plan(self.model, **self.settings)
        if self.asked.compression is not None:
            extension("compression").check(self.asked.compression, plan, scales_loss=False)
        return plan

    def estimate(self) -> MemoryEstimate:
        """All stages side by side. Raises ValueError if the settings do not fit the model."""
        settings = {name: value for name, value in self.settings.items() if name not in ("placement", "offload")}
        settings["activations"] = self.measured and self.measured.total
        if self.model is None:
            settings = {name: settings[name] for name in ("param_dtype", "reduce_dtype")}
        nodes, exchange = self.config.trainer.num_nodes, self.exchange
        settings |= {"world_size": self.ranks, "tensor_parallel_size": self.tensor}
        alone = nodes > 1 and (self.tensor > 1 or self.ranks == nodes)  # others read one another's memory
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

    def numbers(self) -> dict[str, Any]:
        """What ``describe`` says, in bytes; docs/planner.md has the keys."""
        estimate = self.estimate()
        links = {"leaving_nbytes": estimate.leaving_nbytes, "within_nbytes": estimate.within_nbytes}
        return {
            "plan": None if self.model is None else plan_numbers(self.plan(), estimate.micro_steps),
            "estimate": asdict(estimate),
            "activations": {"unknown": self.unknown} if self.unknown else self.measured and asdict(self.measured),
            "recommended": self.memory and asdict(estimate.recommend(**self.memory)),
            **{name: {stage: sent(stage) for stage in estimate.stages} for name, sent in links.items()},
        }

    def report(self) -> str:
        """What the command prints."""
        return json.dumps(self.numbers(), indent=2) if self.config.json else self.describe()

    def describe(self) -> str:
        """The plan, the stages side by side, and what to choose for the given memory."""
        estimate, parts = self.estimate(), []
        if self.model is not None:
            accelerator, steps = estimate.accelerator, estimate.micro_steps
            parts.append(self.plan().describe(optimizer=self.optimizer, accelerator=accelerator, micro_steps=steps))
        advice = None if self.memory is None else estimate.recommend(**self.memory)
        fits = [] if advice is None else [advice.name] if advice.name else advice.fits
        only_with = advice is not None and all(name.endswith("_offload") for name in fits)
        offload = only_with or self.settings["offload"] is not None
        parts.append(estimate.describe(offload=offload))
        parts += [self.unknown] if self.unknown else []
        if self.assumed:
            parts.append("The model's optimizer is not known before training: AdamW is assumed.")
        if advice is not None:
            parts.append(f"Recommended: {advice.name or 'nothing'}. {advice.reason}")
            how = "Give --activations measured, or a size such as --activations 20GB."
            parts[-1] += f" {how}" if advice.name is None and advice.fits else ""
        return "\n\n".join(parts)


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
    """Reads a configuration of ``fit`` with the options of a plan. Nothing is trained or allocated."""

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
        types: dict[str, Any] = {"stage": Stage, "bucket_mib": PositiveFloat, "prefetch": NonNegativeInt}
        types |= {"units": list[str], "offload": Literal["host", "nvme", "none"]}
        types["tensor_parallel_size"] = PositiveInt | Literal["auto"]
        types |= dict.fromkeys(("world_size", "batch_size", "sequence_length"), PositiveInt)
        for name, text in OPTIONS.items():  # all may be left out, and have their hyphens as hyphens too
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            kind: dict[str, Any] = {"type": types.get(name, str) | None, "default": None}
            parser.add_argument(*spellings, help=text, **({"action": "store_true"} if name == "json" else kind))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, the command line without the word ``plan``: without ``LightningCLI``'s warning about
        ``sys.argv``, which holds that word too, and without a seed, as nothing is initialised."""
        if isinstance(args, dict | Namespace):
            self.config = parser.parse_object(args)
        else:
            args = [re.sub(r"^--data(?==\w|$)", "--data.class_path", arg) for arg in args or ()]
            self.config = parser.parse_args(args)
        self.config["seed_everything"] = False

    def instantiate_classes(self) -> None:
        """Make the planner. Raises as ``Planner``."""
        self.planner = Planner(self.config, self.parser)


# -------------------------------------------------------------------------------- what a configuration says of a plan


def arguments_of(configured: Namespace) -> dict[str, Any]:
    """The arguments of a configured class, which need not be named where only one can stand."""
    if "class_path" not in configured:
        return vars(configured)
    return vars(configured.get("init_args") or Namespace())  # type: ignore[no-untyped-call]


def plan_settings(config: Namespace) -> tuple[dict[str, Any], dict[str, Any], SessionSettings]:
    """Arguments of ``build_plan``, of ``estimate_memory`` for the exchange, and both: options, else the strategy's."""
    strategy = config.trainer.strategy
    given: dict[str, Any] = {}
    name = strategy.class_path.rpartition(".")[2] if isinstance(strategy, Namespace) else str(strategy)
    if name.startswith("zero"):
        given = StrategyRegistry[name]["init_params"] if name in StrategyRegistry else {}
    if isinstance(strategy, Namespace) and (given or name == "ZeroStrategy"):
        given = {**given, **arguments_of(strategy)}
    names = ["stage", "units", "bucket_mib", "prefetch", "offload", "broadcast_buffers", "activations"]
    names += ["tensor_parallel_size", "data_parallel_size"]
    settings = {name: given[name] for name in names if given.get(name) is not None}
    exchange = {name: given[name] for name in ("shard_within", "compression", "secondary_shards") if given.get(name)}
    for name in ("stage", "units", "bucket_mib", "prefetch", "tensor_parallel_size"):
        if config[name] is not None:
            settings[name] = config[name]
    if "stage" not in settings:
        shown = strategy.class_path if isinstance(strategy, Namespace) else repr(strategy)
        raise ValueError(
            f"trainer.strategy is {shown}, which has no ZeRO stage: give --stage, or --trainer.strategy zero3"
        )
    stage = settings.pop("stage")  # one that is chosen at set-up shows as the last
    settings["placement"] = placement = Placement.from_stage(3 if stage == "auto" else stage)
    settings["offload"] = _offload(config["offload"], settings.get("offload"), placement)
    for found, name, kind in ((exchange, "compression", Compression), (settings, "activations", ActivationPolicy)):
        if isinstance(chosen := found.get(name), Namespace):
            found[name] = kind(**arguments_of(chosen))
    asked = SessionSettings(**settings, **exchange)
    settings |= {name: getattr(asked, name) for name in ("units", "activations") if name in settings}
    devices = config.trainer.devices
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    devices = len(devices) if isinstance(devices, list) and devices else devices
    if not config.world_size and (not isinstance(devices, int) or devices < 1):
        raise ValueError(f"--world-size is needed: trainer.devices is {devices!r}.")
    world_size = config.world_size or devices * config.trainer.num_nodes
    hosts: int = config.trainer.num_nodes
    data, tensor = world_size, 1
    if asked.tensor_parallel_size is not None:
        data, tensor = extension("tensor_parallel").mesh_sizes(asked, world_size // hosts, world_size)
    exchange["shard_within"] = span = shard_span(asked.shard_within, world_size // hosts // tensor, data)
    placed = partial(asked.placement.on_hosts, hosts, data, span=span, compression=asked.compression)
    settings["placement"] = placed(secondary_shards=asked.secondary_shards and tensor == 1)
    settings |= {"world_size": data, "tensor_parallel_size": tensor}
    settings.pop("data_parallel_size", None)
    return settings, exchange, asked


def _offload(asked: str | None, configured: Any, placement: Placement) -> Offload | None:
    """What ``--offload`` asks for, with the settings of the strategy's ``offload`` where they are of that kind."""
    if isinstance(configured, Namespace):
        settings = arguments_of(configured)
        configured = (NvmeOffload if "path" in settings else HostOffload)(**settings)
    policy, sharded = validate_offload(configured, placement), placement.shards_parameters
    here = NvmeOffload(path=os.curdir, parameters=sharded)  # a plan does not look there
    kinds: dict[str, Offload] = {"host": HostOffload(parameters=sharded), "nvme": here}
    found = kinds.get(asked or "")
    kept = asked is None or (policy is not None and found is not None and policy.tier is found.tier)
    return policy if kept else found


def precision_of(config: Namespace) -> ZeroPrecision:
    """That of the Trainer's ``precision``, or of a ``ZeroPrecision`` among its plugins."""
    trainer = config.trainer
    name = str(trainer.precision or "32-true")
    for plugin in trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]:
        if isinstance(plugin, Namespace) and plugin.class_path.rpartition(".")[2] == "ZeroPrecision":
            given = arguments_of(plugin)
            return ZeroPrecision(**{name: value for name, value in given.items() if name != "scaler"})
    precision: Any = _PRECISION_INPUT_STR_ALIAS_CONVERSION.get(name, name)
    return ZeroPrecision(precision)


def memory_of(config: Namespace, world_size: int) -> dict[str, Any] | None:
    """What there is, as ``recommend`` takes it; ``None`` if that is not said."""
    device, host = (parsed(config, name) for name in ("device_memory", "host_memory"))
    activations = None if config.activations == MEASURED else parsed(config, "activations")
    if device is None and host is not None and config.trainer.accelerator == "cpu":
        device = host * config.trainer.num_nodes // world_size  # a rank's share of what is device and host in one
    if device is None and (host is not None or activations is not None):
        raise ValueError("--host-memory and --activations need --device-memory beside them, for example 80GB.")
    return None if device is None else {"device_nbytes": device, "host_nbytes": host, "activations_nbytes": activations}


def parsed(config: Namespace, name: str) -> Any:
    """The bytes of an option."""
    try:
        return None if config[name] is None else parse_size(config[name])
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')}: {error}") from None


def model_of_config(path: str) -> nn.Module:
    """Build the model that a ``config.json``, or a folder with one, describes, on the meta device.

    The class is the configuration's first architecture where ``transformers`` has it, else what it makes a causal
    language model of. Nothing is downloaded, and no code that comes with a configuration is executed.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"--hf-config is a config.json or a folder with one, and {path!r} is neither. Nothing is downloaded: "
            "fetch the file of a model from the Hugging Face Hub first."
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"--hf-config needs `transformers` ({error}): pip install transformers.") from error
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        # Any name may stand in a file.
        classes = [found for found in named if isinstance(found, type) and issubclass(found, nn.Module)]
        with torch.device("meta"):
            model: nn.Module = (classes or [transformers.AutoModelForCausalLM.from_config])[0](config)
    except Exception as error:  # whatever the library raises for a configuration that it cannot use
        reason = str(error).partition("\n")[0]
        raise ValueError(f"transformers cannot build the model of {file}: {type(error).__name__}: {reason}") from error
    return model


def tokens_for(model: nn.Module, batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    """A batch of tokens without values, for a language model with labels."""
    tokens = torch.empty(batch_size, sequence_length, dtype=torch.int64, device="meta")
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise ValueError(f"{type(model).__name__} takes no tokens: its activations cannot be measured by --hf-config.")
    labels = "labels" in takes and re.search("LM|Gener", type(model).__name__)
    return {"input_ids": tokens, "labels": tokens} if labels else {"input_ids": tokens}
