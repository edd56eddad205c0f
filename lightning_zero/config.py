"""Settings as data: what is sharded, where it is kept between uses, and what is saved.

A ZeRO stage is three answers, not a number: are the parameters, the gradients and the optimizer state of a training
step *replicated* on every rank or *sharded* over the ranks between uses? Nothing outside this file knows a stage
number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from lightning_zero.registry import extension

__all__ = ["ActivationsLike", "ActivationPolicy", "CheckpointLike", "CheckpointPolicy", "Compression", "UnitsLike"]
__all__ += ["HostOffload", "LoaderPolicy", "LoadersLike", "MeshSize", "NvmeOffload", "Offload", "OffloadLike"]
__all__ += ["Placement", "RoundedFormat", "SessionSettings", "ShardWithin", "Stage", "StageLike", "Tier"]
__all__ += ["TimeoutLike", "Uneven"]
__all__ += ["check_whole", "parse_size", "validate_activations", "validate_bucket_mib", "validate_loaders"]
__all__ += ["validate_offload", "validate_prefetch", "validate_timeout", "validate_units"]

Stage = Literal[1, 2, 3]
ShardWithin = Literal["node"] | int | None
MeshSize = Literal["auto"] | int
RoundedFormat = Literal["bfloat16", "int8", "int4"]
# What users may write; the functions at the end of this file turn it into what the package works with.
StageLike = Literal[1, 2, 3, "1", "2", "3", "auto"]
UnitsLike = str | type | Sequence[str | type] | Set[str | type]
TimeoutLike = timedelta | float | None

_LEAST_NBYTES = 100_000  # of a size without a unit


def _number(default: float | None, unit: str, *, least: int, whole: bool = False) -> Any:
    """A field of a policy that holds a number of at least ``least``, or None where its type allows that."""
    return field(default=default, metadata={"unit": unit, "least": least, "whole": whole})


def _check_fields(policy: Any) -> None:
    """Raise ValueError, naming class and field, for a switch that is no bool, an unknown word, or a wrong number.

    jsonargparse checks types of a configuration. This is for settings that come from Python.
    """
    hints = get_type_hints(type(policy))
    for one in fields(policy):
        name, value, hint = f"{type(policy).__name__}.{one.name}", getattr(policy, one.name), hints[one.name]
        kinds = get_args(hint) or (hint,)
        if value is None and type(None) in kinds:
            continue
        words = [word for kind in (hint, *kinds) if get_origin(kind) is Literal for word in get_args(kind)]
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}.")
        if words and value not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}.")
        if one.metadata:
            least, unit, whole = one.metadata["least"], one.metadata["unit"], one.metadata["whole"]
            right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not right or not least <= value < float("inf"):
                what = f"a {'whole ' * whole}number of {unit}, {least} or more"
                raise ValueError(f"{name} must be {what}, got {value!r}.")


def check_whole(name: str, value: object, *, least: int, unit: str) -> int:
    """Return ``value`` if it is a whole number of at least ``least``; else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of {unit}, {least} or more, got {value!r}.")
    return value


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where parameters, gradients and optimizer state stay between uses.

    Sharded parameters are freed whenever their unit does not compute, sharded gradients are reduced and freed in every
    backward. Optimizer state is always sharded: that is what ZeRO is. ``span``: ranks that share what is sharded, in
    groups that each hold all of it; ``None``: all. ``keeping``: ranks of a host, each of which keeps a part of the
    weights that came from other hosts. ``feedback``: ranks that divide what is rounded of a gradient, each of which
    keeps what it loses.

    Source: ZeRO, sections 5.1 to 5.3 (arXiv:1910.02054); MiCS, for the span (arXiv:2205.00119).
    """

    shards_parameters: bool
    shards_gradients: bool
    span: int | None = None
    keeping: int | None = None
    feedback: int | None = None

    def __post_init__(self) -> None:
        if self.shards_parameters and not self.shards_gradients:
            raise ValueError("Placement with sharded parameters needs sharded gradients.")
        if self.span is not None:
            check_whole("Placement.span", self.span, least=1, unit="ranks, or None")

    @property
    def words(self) -> dict[str, str]:
        """Who holds each between uses, for people and checkpoints."""
        sharded = {"parameters": self.shards_parameters, "gradients": self.shards_gradients, "optimizer": True}
        return {what: "sharded" if it_is else "replicated" for what, it_is in sharded.items()}

    def __str__(self) -> str:
        return ", ".join(f"{what} {word}" for what, word in self.words.items())

    @classmethod
    def from_stage(cls, stage: int | str) -> Placement:
        """What a ZeRO stage number means, also as a string; ValueError if it is not 1, 2 or 3."""
        if isinstance(stage, str) and stage.isdecimal():
            stage = int(stage)
        if stage not in _PLACEMENTS or isinstance(stage, bool):
            raise ValueError(
                f"ZeRO stage must be one of {', '.join(map(str, get_args(Stage)))}, got {stage!r}. Stage 1 shards the "
                "optimizer state, 2 also the gradients, 3 also the parameters; for none of these use strategy='ddp'."
            )
        return _PLACEMENTS[stage]

    def on_hosts(
        self, hosts: int, world_size: int, *, span: int | None, secondary_shards: bool, compression: Any
    ) -> Placement:
        """The same with what is kept and fed back, where all ranks are on so many hosts, with equally many on each."""
        feeds = hosts > 1 and compression is not None and compression.error_feedback
        return replace(
            self,
            span=span,
            keeping=world_size // hosts if secondary_shards and 1 < hosts < world_size else None,
            feedback=(span or world_size // hosts) if feeds else None,
        )


_PLACEMENTS = {
    1: Placement(shards_parameters=False, shards_gradients=False),
    2: Placement(shards_parameters=False, shards_gradients=True),
    3: Placement(shards_parameters=True, shards_gradients=True),
}


class Tier(Enum):
    """Which memory bytes rest in between uses."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class HostOffload:
    """Offload optimizer state, masters and gradients, or parameters too, to host memory.

    Args:
        optimizer: keep masters, reduced gradients and optimizer state on the host, and run the optimizer step there,
            unit by unit.
        parameters: keep the parameter shards on the host too (stage 3 only). With ``optimizer=False`` this applies to
            frozen parameters only, because trained ones are stepped where they are kept.
        pin_mib: the most host memory to pin, in MiB, for copies that overlap with compute; ``None``: all that is
            copied to or from the device (masters, gradients, parameters; optimizer state never is). Used only with an
            accelerator.
        threads: threads of the optimizer step on each rank; ``None``: the node's cores divided by its ranks, and on a
            CPU no more than torch is set to.

    Raises:
        ValueError: naming the setting.

    Source: ZeRO-Offload (arXiv:2101.06840).
    """

    optimizer: bool = True
    parameters: bool = False
    pin_mib: float | None = _number(None, "MiB", least=0)
    threads: int | None = _number(None, "threads", least=1, whole=True)

    tier: ClassVar[Tier] = Tier.HOST

    def __post_init__(self) -> None:
        _check_offload(self)


@dataclass(frozen=True, kw_only=True)
class NvmeOffload:
    """Offload masters and optimizer state to files. Host memory holds reduced gradients and one pool of buffers.

    Args:
        path: an existing, writable directory on a fast local disk. Every rank has a file there that has no name, so the
            system frees its space however the run ends.
        optimizer: keep masters and optimizer state in files. A step reads, updates and writes them in pieces.
        parameters: keep the parameter shards in files too (stage 3 only), as for ``HostOffload``.
        buffer_mib: size of the pool of buffers on each rank, in MiB. Pinned with an accelerator.
        io_threads: threads that read and write on each rank.
        checksums: verify everything that is read, so that corruption on disk raises an error. Takes 2 KiB of host
            memory for each MiB in files.
        threads: as for ``HostOffload``.

    Raises:
        ValueError: naming the setting.

    Source: ZeRO-Infinity (arXiv:2104.07857).
    """

    path: str = field(kw_only=False)
    optimizer: bool = True
    parameters: bool = False
    buffer_mib: float = _number(256.0, "MiB", least=1)
    io_threads: int = _number(4, "threads", least=1, whole=True)
    threads: int | None = _number(None, "threads", least=1, whole=True)
    checksums: bool = True

    tier: ClassVar[Tier] = Tier.DISK

    def __post_init__(self) -> None:
        _check_offload(self)
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise ValueError(f"NvmeOffload.path must be a directory, got {self.path!r}.")
        object.__setattr__(self, "path", os.fspath(self.path))


Offload = HostOffload | NvmeOffload
OffloadLike = Offload | Literal["cpu", "host"] | bool | None


def _check_offload(policy: Offload) -> None:
    _check_fields(policy)
    if not policy.optimizer and not policy.parameters:
        name = type(policy).__name__
        raise ValueError(f"{name} with optimizer=False and parameters=False offloads nothing: leave `offload` out.")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Round weights or gradients that are sent between nodes; see ``extensions/compression``.

    Meant for slow networks. It changes numbers: losses are close to those without compression, not the same. Traffic
    within a node is never rounded.

    Args:
        weights: format of the weights in an all-gather; ``None``: not rounded. Applies in stage 3, and in stages 1
            and 2 with mixed precision; the masters stay exact.
        gradients: format of the gradients between nodes; ``None``: not rounded.
        error_feedback: add the rounding error of the gradients to the next exchange, see
            ``extensions/compression``. Costs 4/S bytes per parameter on each rank, with S ranks per node.

    Raises:
        ValueError: if a setting is not usable.

    Source: ZeRO++ (arXiv:2306.10209), sections 3.1 and 3.3; EF-SGD (arXiv:1901.09847), for the feedback.
    """

    weights: Literal["bfloat16", "int8"] | None = None
    gradients: RoundedFormat | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.weights is None and self.gradients is None:
            raise ValueError("Compression of nothing: give weights, gradients or both, for example gradients='int8'.")
        if self.error_feedback and self.gradients is None:
            raise ValueError("Compression.error_feedback needs rounded gradients: set gradients, too, as 'int4'.")


@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """Activation checkpointing and activation offload: what happens to the tensors that autograd saves.

    Losses, gradients and buffers are bit for bit the same with any policy, under the rules of
    ``torch.utils.checkpoint`` (``use_reentrant=False``): a forward that runs again may depend only on arguments,
    weights, attributes and the random states of torch and Python, and must not change an argument. A module that
    changes a buffer or attribute in place, such as ``BatchNorm`` in training, raises an error that names its class.

    Args:
        checkpointing: modules whose forward runs again in backward instead of saving activations: ``"units"`` for the
            modules that stage 3 gathers, in any stage (except units inside of others, and single layers of torch), or
            classes or their names; ``None`` for none. Switch off caches of keys and values.
        offload: keep saved tensors in host memory until the backward. Saves no memory on CPUs, where both sides are
            host memory.
        partition: split what checkpointed modules keep over the ranks of a tensor-parallel group; with ``offload`` the
            parts go to the host.
        min_kib: leave saved tensors smaller than this where they are, in KiB.

    Raises:
        ValueError: naming the setting.
        ExtensionError: if it needs an extension that this copy of the package has not.
    """

    checkpointing: UnitsLike | None = field(default=None, kw_only=False)
    offload: bool = False
    partition: bool = False
    min_kib: float = _number(64.0, "KiB", least=0)

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.checkpointing is not None and self.checkpointing != "units":
            names = validate_units(self.checkpointing, "ActivationPolicy.checkpointing, where it is not 'units',")
            object.__setattr__(self, "checkpointing", list(names or ()))
        if self.partition:
            extension("partitioned_activations")
            if self.checkpointing is None:
                raise ValueError(
                    "ActivationPolicy(partition=True) is about what checkpointed modules keep: give checkpointing, too."
                )


ActivationsLike = ActivationPolicy | UnitsLike | None
Format = Literal["sharded", "consolidated"]


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """What checkpoints contain, how they are written, and where the initial weights come from.

    Args:
        format: ``sharded`` writes a directory in which every rank writes its own shard; ``consolidated`` writes one
            ordinary Lightning file, which any strategy loads without this package (not to URLs).
        async_save: write in the background. Training waits only for a copy in host memory, as large as the rank's
            shard of the checkpoint.
        exclude_frozen: leave out parameters that do not require gradients: a fine-tuning run then saves its adapters
            only. When such a checkpoint is loaded, frozen parameters keep the values they have, for example from
            ``initial_weights``.
        verify: check every checksum before loading; a warning names files that have none. Otherwise sizes and
            structure are checked, and a sample of each file of this package's directories.
        initial_weights: load the weights before the first step from a checkpoint of this or another strategy, a
            safetensors file or a Hugging Face directory. Weights only; a run that resumes with ``ckpt_path`` loads
            its checkpoint afterwards.
        strict_initial_weights: raise an error for missing, unexpected and differently shaped tensors. Otherwise they
            keep the values they were built with, and a warning names them. Adapters of peft may be missing.
        frozen_as_built: let frozen parameters that are missing keep the values they were built with. Otherwise they
            raise an error, whatever ``strict_initial_weights`` is: nothing would ever train them.

    Raises:
        ValueError: naming the setting.
    """

    format: Format = field(default="sharded", kw_only=False)
    async_save: bool = False
    exclude_frozen: bool = False
    verify: bool = False
    initial_weights: str | None = None
    strict_initial_weights: bool = True
    frozen_as_built: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.initial_weights is not None and not (isinstance(self.initial_weights, str) and self.initial_weights):
            raise ValueError(
                f"CheckpointPolicy.initial_weights must be a path or URL as a string, got {self.initial_weights!r}."
            )

    def for_one_save(self, storage_options: Any) -> CheckpointPolicy:
        """The policy with what ``trainer.save_checkpoint(..., storage_options=...)`` overrides; ValueError for anything
        but ``None`` or a dictionary with ``format`` and ``async``, each optional."""
        if storage_options is None:
            return self
        if not isinstance(storage_options, Mapping) or set(storage_options) - {"format", "async"}:
            raise ValueError(
                "storage_options of ZeroStrategy is a dictionary with the keys 'format' ('sharded' or 'consolidated') "
                f"and 'async' (true or false), each optional; got {storage_options!r}."
            )
        return replace(
            self,
            format=storage_options.get("format", self.format),
            async_save=storage_options.get("async", self.async_save),
        )


CheckpointLike = CheckpointPolicy | Format
Uneven = Literal["error", "join", "stop"]


@dataclass(frozen=True, kw_only=True)
class LoaderPolicy:
    """What to do when some ranks run out of batches before others.

    ``error``: raise an error on every rank, which names the ranks that ended. ``stop``: all ranks stop with the first
    one, and the remaining batches of the others are not used. ``join``: a rank without a batch takes part in the step
    without one.

    Args:
        training: for training.
        evaluation: for validation, test and predict.

    Raises:
        ValueError: naming the setting.
    """

    training: Literal["error", "stop"] = "error"
    evaluation: Uneven = "join"

    def __post_init__(self) -> None:
        _check_fields(self)


LoadersLike = LoaderPolicy | Literal["error", "stop"]

# ------------------------------------------------------------------ each raises ValueError, or returns what is usable


def validate_bucket_mib(bucket_mib: float) -> float:
    """The size of a bucket in MiB is a positive, finite number."""
    if isinstance(bucket_mib, bool) or not isinstance(bucket_mib, (int, float)) or not 0 < bucket_mib < float("inf"):
        raise ValueError(f"bucket_mib must be a positive number of MiB, got {bucket_mib!r}. The default is 100.")
    return float(bucket_mib)


def validate_timeout(timeout: TimeoutLike) -> timedelta | None:
    """How long ranks wait for one another: a time of more than zero, or so many seconds."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if timeout is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < _MAX_SECONDS:
        raise ValueError(f"timeout must be a positive number of seconds or a timedelta, got {timeout!r}.")
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=seconds)


_MAX_SECONDS = timedelta.max.total_seconds()


def validate_offload(offload: OffloadLike, placement: Placement) -> Offload | None:
    """What is offloaded is nothing or a policy, which offloads parameters only where they are sharded.

    ``"cpu"``, ``"host"`` and ``True`` mean all that a stage can keep on the host, as in ``zero3_offload``.
    """
    if offload is True or (isinstance(offload, str) and offload in ("cpu", "host")):
        return HostOffload(parameters=placement.shards_parameters)
    if offload is False:
        return None
    if offload is not None and not isinstance(offload, Offload):
        raise ValueError(f"offload must be a HostOffload, an NvmeOffload('/local') or 'cpu', got {offload!r}.")
    if offload is not None and offload.parameters and not placement.shards_parameters:
        raise ValueError(
            f"{type(offload).__name__}.parameters is for stage 3 only: in stages 1 and 2 every rank computes with full "
            "parameters all the time, so there is nothing to keep elsewhere. Leave it out, or use stage 3."
        )
    return offload


def validate_activations(activations: ActivationsLike) -> ActivationPolicy | None:
    """What happens to activations is nothing or a policy, or what is checkpointed: ``"units"``, or classes."""
    policy = activations is None or isinstance(activations, ActivationPolicy)
    return activations if policy else ActivationPolicy(activations)  # type: ignore[arg-type, return-value]


def validate_loaders(loaders: LoadersLike) -> LoaderPolicy:
    """What happens where data end is a policy, or one of its words, which is then for training and evaluation."""
    return loaders if isinstance(loaders, LoaderPolicy) else LoaderPolicy(training=loaders, evaluation=loaders)


def validate_prefetch(prefetch: int | None) -> None:
    """Raise ValueError unless ``prefetch`` is a usable number, or ``None``."""
    if prefetch is not None:
        check_whole("prefetch", prefetch, least=0, unit="units gathered ahead (0: none)")


def parse_size(size: str | int) -> int:
    """Bytes of ``"5G"`` or ``"5GB"`` (10^9 bytes each), ``"2Gi"`` or ``"2GiB"`` (2^30), or of a number of bytes.

    Raises:
        ValueError: for anything else, and for a text without a unit that would be too few bytes to be meant.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?(B?)\s*", str(size).upper())
    number = float(matched[1]) if matched else 0.0
    if isinstance(size, bool) or matched is None or number <= 0:
        raise ValueError(f"a size in bytes, or like '80G', '500MB' or '2GiB', is needed, got {size!r}")
    if isinstance(size, str) and not (matched[2] or matched[4]) and number < _LEAST_NBYTES:
        raise ValueError(f"{matched[1]} would be so many bytes. Did you mean {matched[1]}GB?")
    power = " KMGT".index(matched[2] or " ")
    return max(1, int(number * (1024 if matched[3] else 1000) ** power))


def validate_units(units: UnitsLike | None, what: str = "units") -> tuple[str, ...] | None:
    """Names of the classes that become units, as a tuple, or ``None`` for the automatic rule.

    A class counts by its name, and of a dotted name its last part. Sets are sorted: their order is not that of other
    ranks.
    """
    if units is None:
        return None
    given: Any = [units] if isinstance(units, (str, type)) else units
    if not isinstance(given, Sequence | Set):
        raise ValueError(f"{what} must be a list of class names such as ['Block'], got {units!r}.")
    names = [unit.__name__ if isinstance(unit, type) else unit for unit in given]
    if not names:
        raise ValueError(
            f"{what} must name at least one class, or be left out to find units automatically; got {units!r}."
        )
    for name in names:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{what} must hold class names such as 'Block', got {name!r}.")
    names = [name.rpartition(".")[2] for name in names]
    return tuple(sorted(set(names)) if isinstance(units, Set) else dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How a module is sharded, and what is saved of it: the arguments of ``ZeroStrategy``, which explains them.

    They may be given as users write them there: the fields hold what the functions above make of that.

    Raises:
        ValueError: if a setting is not usable.
        ExtensionError: if it needs an extension that this copy of the package has not.
    """

    placement: Placement
    units: tuple[str, ...] | None = None
    shard_within: ShardWithin = None
    compression: Compression | None = None
    secondary_shards: bool = False
    bucket_mib: float = 100.0
    prefetch: int | None = None
    offload: Offload | None = None
    activations: ActivationPolicy | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    broadcast_buffers: bool = True
    allocate_memory_from_process_group: bool = False
    tensor_parallel_size: MeshSize | None = None
    data_parallel_size: MeshSize = "auto"
    automatic: bool = False  # the placement, and whether to offload, are chosen when the module is sharded

    def __post_init__(self) -> None:
        validate_bucket_mib(self.bucket_mib)
        validate_prefetch(self.prefetch)
        saved: CheckpointLike = self.checkpoint
        usable = {
            "units": validate_units(self.units),
            "offload": validate_offload(self.offload, self.placement),
            "activations": validate_activations(self.activations),
            "checkpoint": saved if isinstance(saved, CheckpointPolicy) else CheckpointPolicy(saved),
        }
        for name, value in usable.items():
            object.__setattr__(self, name, value)
        for name in ("broadcast_buffers", "secondary_shards", "allocate_memory_from_process_group"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.shard_within is not None and self.shard_within != "node":
            check_whole("shard_within, where it is not 'node',", self.shard_within, least=2, unit="ranks")
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if (size := getattr(self, name)) not in (None, "auto"):
                check_whole(f"{name}, where it is not 'auto',", size, least=1, unit="ranks")
        if self.tensor_parallel_size is None and self.data_parallel_size != "auto":
            raise ValueError(
                "data_parallel_size goes with tensor_parallel_size: without it, all ranks have other data."
            )
        compression, within = self.compression, self.shard_within is not None
        if compression is not None and not isinstance(compression, Compression):
            raise ValueError(
                f"compression must be a Compression, got {compression!r}. Write Compression(gradients='int8')."
            )
        if within and compression is not None and compression.weights is not None:
            raise ValueError(
                f"Compression.weights={compression.weights!r} does not go with shard_within, whose groups gather "
                "weights as they are: leave weights out, and compress gradients, which is what goes between groups."
            )
        if self.secondary_shards and not self.placement.shards_parameters:
            raise ValueError("secondary_shards is for stage 3: in stages 1 and 2 weights are gathered once a step.")
        if self.automatic and self.secondary_shards:
            raise ValueError("secondary_shards is for stage 3, and stage='auto' may take another: give stage=3.")
        if self.secondary_shards and within:
            raise ValueError("shard_within keeps all shards within groups: leave secondary_shards out, or the other.")
        asked = {
            "nvme": isinstance(self.offload, NvmeOffload),
            "compression": compression,
            "hops": self.secondary_shards,
            "tensor_parallel": self.tensor_parallel_size is not None,
            "planner": self.automatic,
        }
        for name, needed in asked.items():
            if needed:
                extension(name)

    @classmethod
    def from_user(cls, stage: StageLike, **settings: Any) -> SessionSettings:
        """The settings of a strategy, with a stage in the place of ``placement``."""
        automatic = stage == "auto"  # until it is chosen, that of stage 3 says what may be sharded
        return cls(placement=Placement.from_stage(3 if automatic else stage), automatic=automatic, **settings)
