"""What a configuration says of a plan: options of ``lightning-zero plan``, else what its Trainer is given; and models
of transformers, of their own configurations."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

import torch
from jsonargparse import Namespace
from torch import Tensor, nn

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
    Tier,
    parse_size,
    validate_offload,
)
from lightning_zero.plan.plan import MIXED_DTYPES, TRUE_DTYPES

if TYPE_CHECKING:
    from lightning_zero.trainer.precision import ZeroPrecision

__all__ = [
    "MEASURED",
    "Precision",
    "adapted",
    "arguments_of",
    "memory_of",
    "model_of_config",
    "parsed",
    "plan_settings",
    "precision_of",
    "tokens_for",
]

MEASURED = "measured"
_STAGES: Mapping[str, dict[str, Any]] = {f"zero{stage}": {"stage": stage} for stage in get_args(Stage)}


Precision: TypeAlias = "NamedPrecision | ZeroPrecision"


def arguments_of(configured: Namespace) -> dict[str, Any]:
    """The arguments of a configured class, which need not be named where only one can stand."""
    if "class_path" not in configured:
        return vars(configured)
    return vars(configured.get("init_args") or Namespace())  # type: ignore[no-untyped-call]


def plan_settings(config: Namespace) -> tuple[dict[str, Any], dict[str, Any], SessionSettings]:
    """Arguments of ``build_plan``, of ``estimate_memory`` for the exchange, and both: options, else the strategy's."""
    strategy, given = config.trainer.strategy, {}
    name = strategy.class_path.rpartition(".")[2] if isinstance(strategy, Namespace) else str(strategy)
    if name.startswith("zero"):
        given = _STAGES.get(name) or _registered(name)
    if isinstance(strategy, Namespace) and (given or name == "ZeroStrategy"):
        given = {**given, **arguments_of(strategy)}
    names = ("stage", "units", "bucket_mib", "prefetch", "offload", "broadcast_buffers", "activations")
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
    settings["placement"] = placement = Placement.from_stage(settings.pop("stage"))
    settings["offload"] = _offload(config["offload"], settings.get("offload"), placement)
    for found, name, kind in ((exchange, "compression", Compression), (settings, "activations", ActivationPolicy)):
        if isinstance(chosen := found.get(name), Namespace):
            found[name] = kind(**arguments_of(chosen))
    asked = SessionSettings(**settings, **exchange)
    settings |= {name: getattr(asked, name) for name in ("units", "activations") if name in settings}
    world_size = config.world_size or _world_size(config.trainer.devices, config.trainer.num_nodes)
    hosts: int = config.trainer.num_nodes
    exchange["shard_within"] = span = shard_span(asked.shard_within, world_size // hosts, world_size)
    sent: dict[str, Any] = {"secondary_shards": asked.secondary_shards, "compression": asked.compression}
    settings["placement"] = asked.placement.on_hosts(hosts, world_size, span=span, **sent)
    settings["world_size"] = world_size
    return settings, exchange, asked


def _registered(name: str) -> dict[str, Any]:
    from lightning.pytorch.strategies import StrategyRegistry

    settings: dict[str, Any] = StrategyRegistry[name]["init_params"] if name in StrategyRegistry else {}
    return settings


def _offload(asked: str | None, configured: Any, placement: Placement) -> Offload | None:
    """What ``--offload`` asks for, with the settings of ``configured`` where they are of that kind.

    ``configured`` is the strategy's ``offload``: a policy, or what it would be made of.
    """
    if isinstance(configured, Namespace):
        settings = arguments_of(configured)
        configured = (NvmeOffload if "path" in settings else HostOffload)(**settings)
    policy = validate_offload(configured, placement)
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


class NamedPrecision(NamedTuple):
    """What a plan has to know of a precision that is a name, without Lightning."""

    dtype: torch.dtype | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None = None
    full_precision: Sequence[str] = ()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast a module for the ``-true`` precisions."""
        return module if self.dtype is None else module.to(dtype=self.dtype)


def precision_of(config: Namespace) -> Precision:
    """That of the Trainer's ``precision``, or of a ``ZeroPrecision`` among its plugins.

    Without Lightning, where neither model nor batch is of it; see [Note: without Lightning].
    """
    trainer = config.trainer
    name = str(trainer.precision or "32-true")
    plain = not trainer.plugins and config.model is None and config.activations != MEASURED
    if plain and name in ("32-true", *TRUE_DTYPES, *MIXED_DTYPES):
        return NamedPrecision(TRUE_DTYPES.get(name), MIXED_DTYPES.get(name))
    from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR_ALIAS_CONVERSION

    from lightning_zero.trainer.precision import ZeroPrecision

    for plugin in trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]:
        if isinstance(plugin, Namespace) and plugin.class_path.rpartition(".")[2] == "ZeroPrecision":
            given = arguments_of(plugin)
            names = ("precision", "reduce_dtype", "full_precision")
            return ZeroPrecision(**{name: given[name] for name in names if name in given})
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
    return device and {"device_nbytes": device, "host_nbytes": host, "activations_nbytes": activations}


def parsed(config: Namespace, name: str, parse: Callable[[str], Any] = parse_size) -> Any:
    """Bytes of an option, or bytes a second."""
    try:
        return None if config[name] is None else parse(config[name])
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
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"{file} has no 'model_type', so it does not describe a model of transformers.")
    try:
        transformers: Any = importlib.import_module("transformers")  # which this package does not depend on
    except ImportError as error:
        raise ImportError(
            f"--hf-config needs the package `transformers` ({error}). Install it with `pip install transformers`, or "
            "give --parameters."
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**content)
        named = [getattr(transformers, name, None) for name in content.get("architectures") or ()]
        # Any name may stand in a file.
        classes = [found for found in named if isinstance(found, type) and issubclass(found, nn.Module)]
        with torch.device("meta"):
            model: nn.Module = (classes or [transformers.AutoModelForCausalLM.from_config])[0](config)
    except Exception as error:  # whatever the library raises for a configuration that it cannot use
        reason = str(error).partition("\n")[0]
        raise ValueError(f"transformers cannot build the model of {file}: {type(error).__name__}: {reason}") from error
    return model


def adapted(model: nn.Module, config: Namespace) -> nn.Module:
    """The model with the adapters of ``--lora``, which alone are trained then, where PEFT would put them."""
    if config.lora is None:
        if config.lora_targets is not None:
            raise ValueError("--lora-targets needs --lora, the rank of the adapters, for example 16.")
        return model
    try:
        peft: Any = importlib.import_module("peft")  # which this package does not depend on
    except ImportError as error:
        raise ImportError(f"--lora needs the package `peft` ({error}): pip install peft") from error
    targets = config.lora_targets
    if targets is not None and targets != "all-linear":
        targets = re.split(r"[\s,]+", targets.strip("[] "))
    try:
        with torch.device("meta"):
            peft.inject_adapter_in_model(peft.LoraConfig(r=config.lora, target_modules=targets), model)
    except ValueError as error:
        raise ValueError(
            f"--lora: {str(error).rstrip('.')}. Name modules of the model with --lora-targets q_proj,v_proj."
        ) from error
    return model


def tokens_for(model: nn.Module, batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    """A batch of tokens without values, for a language model with labels."""
    tokens = torch.empty(batch_size, sequence_length, dtype=torch.int64, device="meta")
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise ValueError(f"{type(model).__name__} takes no tokens: its activations cannot be measured by --hf-config.")
    labels = "labels" in takes and re.search("LM|Gener", type(model).__name__)
    return {"input_ids": tokens, "labels": tokens} if labels else {"input_ids": tokens}
