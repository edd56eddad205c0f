"""``lightning-zero plan``: how a model would be split, what every stage would take, and which one to choose.

[Note: without Lightning]

To import Lightning takes several seconds, which is most of what a plan takes. The options of a plan and those of the
Trainer that count in one can be read without it, and so can a number of parameters and a configuration of transformers
be planned. Whatever else is on the command line goes to ``PlanCLI``, which knows every option of ``fit``.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn
from torch.optim import Optimizer

from lightning_zero._torch import tree_leaves
from lightning_zero.config import Stage
from lightning_zero.extensions.planner.estimate import (
    MemoryEstimate,
    Recommendation,
    Way,
    describe_ways,
    estimate_memory,
    fastest_way,
    parse_speed,
    ways_to_send,
)
from lightning_zero.extensions.planner.options import OPTIONS
from lightning_zero.extensions.planner.report import plan_numbers
from lightning_zero.extensions.planner.settings import (
    MEASURED,
    adapted,
    arguments_of,
    memory_of,
    model_of_config,
    parsed,
    plan_settings,
    precision_of,
    tokens_for,
)
from lightning_zero.plan.costs import ADAM, OptimizerCost, ZeroPlan, build_plan
from lightning_zero.registry import extension

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_zero.extensions.planner.measure import ActivationBytes

__all__ = ["Planner", "add_plan_options", "planner_without_lightning"]

# Of the Trainer's arguments those that count in a plan, with the values that need no class.
_TRAINER: Mapping[str, tuple[Any, Any]] = {
    "accelerator": (str, "auto"),
    "strategy": (Literal[tuple(f"zero{stage}" for stage in get_args(Stage))], "zero3"),  # that of ``ZeroCLI``
    "devices": (list[int] | str | int, "auto"),
    "num_nodes": (int, 1),
    "precision": (str | int | None, None),
    "accumulate_grad_batches": (int, 1),
}


def add_plan_options(parser: ArgumentParser) -> None:
    """Add what describes the model and the machine, and the settings of the plan."""
    types: dict[str, Any] = {"stage": Stage, "bucket_mib": PositiveFloat, "prefetch": NonNegativeInt}
    types |= {"units": list[str], "offload": Literal["host", "nvme", "none"]}
    types |= dict.fromkeys(("world_size", "batch_size", "sequence_length", "lora"), PositiveInt)
    for name, text in OPTIONS.items():  # all may be left out, and have their hyphens as hyphens too
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        kind: dict[str, Any] = {"type": types.get(name, str) | None, "default": None}
        parser.add_argument(*spellings, help=text, **({"action": "store_true"} if name == "json" else kind))


def planner_without_lightning(args: Sequence[str]) -> Planner | None:
    """The planner of a command line, or ``None`` if that needs Lightning; see [Note: without Lightning].

    Raises as ``Planner``.
    """
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    add_plan_options(parser)
    for name, (kind, default) in _TRAINER.items():
        parser.add_argument(f"--trainer.{name}", type=kind, default=default)
    try:
        config = parser.parse_args(list(args))
    except ArgumentError:  # what it is about is for the other parser to say
        return None
    if config.activations == MEASURED:
        return None
    config.model = config.data = config.trainer.plugins = None
    return Planner(config, parser)


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
        self.settings, self.exchange, self.asked = plan_settings(config)
        precision = precision_of(config)
        self.memory = memory_of(config, self.settings["world_size"])
        self.speeds = [parsed(config, f"link_{name}", parse_speed) for name in ("between", "within")]
        if self.speeds[0] and config.trainer.num_nodes == 1:
            raise ValueError("--link-between is between machines, and there is one: give --trainer.num_nodes.")
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
    def on_host(self) -> bool:
        """Whether processes compute on CPUs; "auto" stands for an accelerator, as plans are made for other machines."""
        on_host: bool = self.config.trainer.accelerator == "cpu"
        return on_host

    def _module(self) -> nn.Module | None:
        if self.config.hf_config is not None:
            return adapted(model_of_config(self.config.hf_config), self.config)
        if self.config.model is None:
            if self.config.lora is not None:
                raise ValueError("--lora needs the model, as adapters are as large as its layers: give --hf-config.")
            return None
        with torch.device("meta"):
            only_model = Namespace(model=self.config.model)  # type: ignore[no-untyped-call]
            model: LightningModule = self._parser.instantiate(only_model).model
        with self._attached(model):
            model.configure_model()
        return adapted(model, self.config)

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
            with self._attached(model), warnings.catch_warnings():
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
        from lightning_zero.extensions.planner.measure import (
            first_batch,
            measure_activations,  # imports torchmetrics, which imports transformers
        )

        settings: Any = {name: self.settings.get(name) for name in ("param_dtype", "full_precision", "units")}
        settings |= {"accelerator": not self.on_host, "policy": policy}
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
            **{name: trainer[name] for name in names}, **answers, world_size=self.settings["world_size"]
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

    def estimate(self, exchange: Mapping[str, Any] | None = None) -> MemoryEstimate:
        """All stages side by side, with the configured exchange or another. Raises ValueError if it does not fit."""
        settings = {name: value for name, value in self.settings.items() if name not in ("placement", "offload")}
        settings["activations"] = self.measured and self.measured.total
        if self.model is None:
            settings = {name: settings[name] for name in ("world_size", "param_dtype", "reduce_dtype")}
        nodes, exchange = self.config.trainer.num_nodes, self.exchange if exchange is None else exchange
        alone = self.settings["world_size"] == nodes > 1  # others read one another's memory
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
            "plan": None if self.model is None else plan_numbers(self.plan(), estimate.micro_steps),
            "estimate": asdict(estimate),
            "activations": {"unknown": self.unknown} if self.unknown else self.measured and asdict(self.measured),
            "recommended": self.memory and asdict(estimate.recommend(**self.memory)),
            "ways": [asdict(way) for way in ways],
            "fastest": fastest and asdict(fastest),
        }

    def draw(self, path: str) -> None:
        """Write the picture of the stages side by side. Raises OSError or ValueError where that cannot be."""
        estimate, memory = self.estimate(), self.memory or {}
        offload = self._shows_offload(estimate.recommend(**memory) if memory else None)
        estimate.draw(path, device_nbytes=memory.get("device_nbytes"), offload=offload)

    def _shows_offload(self, advice: Recommendation | None) -> bool:
        fits = [] if advice is None else [advice.name] if advice.name else advice.fits
        only_with = advice is not None and all(name.endswith("_offload") for name in fits)
        return only_with or self.settings["offload"] is not None

    def report(self) -> str:
        """What the command prints, after it has drawn the picture that it was asked for."""
        if self.config.plot is not None:
            self.draw(self.config.plot)
        return json.dumps(self.numbers(), indent=2) if self.config.json else self.describe()

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
        if self.config.lora is not None and self.model is not None:
            trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
            parts.append(f"LoRA of rank {self.config.lora}: {trained:,} parameters are trained, the others are frozen.")
        uncounted = advice is not None and advice.name is None and bool(advice.fits)
        if advice is not None:
            parts.append(f"Recommended: {advice.name or 'nothing'}. {advice.reason}")
            parts[-1] += f" {self._how_to_count}" if uncounted else ""
        if any(self.speeds):
            ways = [way for way in self.ways() if offload or "_offload" not in way.stage]
            parts.append(describe_ways(ways) + " Activations are not counted." * uncounted)
        return "\n\n".join(parts)

    @property
    def _how_to_count(self) -> str:
        if self.model is None:
            return (
                "Give --activations, for example 20GB; with --hf-config in place of --parameters they can be measured."
            )
        sizes = "" if self.config.hf_config is None else " --batch-size 1 --sequence-length 4096"
        return f"Give --activations {MEASURED}{sizes}, or a size such as --activations 20GB."
