"""Settings that say where bytes rest and what is saved, as data.

A ZeRO stage is three answers, not a number: are the parameters, the gradients and the optimizer state of a training
step *replicated* on every rank or *sharded* over the ranks between uses? Nothing outside this file knows a stage
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, get_args

__all__ = [
    "CheckpointPolicy",
    "Placement",
    "Residence",
    "Stage",
    "validate_bucket_mib",
    "validate_checkpoint",
    "validate_prefetch",
    "validate_units",
]

Stage = Literal[1, 2, 3]


class Residence(Enum):
    """Who holds a kind of bytes between uses."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where parameters, gradients and optimizer state rest between uses.

    Args:
        parameters: ``SHARDED`` frees the full parameters of a unit whenever the unit is not computing.
        gradients: ``SHARDED`` reduces and frees gradients in every backward; ``REPLICATED`` keeps the full local
            gradients until the last micro-step of a step.
        optimizer: ``SHARDED`` lets every rank update its own part only. Always sharded here: that is what ZeRO is.

    Source: ZeRO, sections 5.1 to 5.3 (arXiv:1910.02054).
    """

    parameters: Residence
    gradients: Residence
    optimizer: Residence = Residence.SHARDED

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "optimizer"):
            value = getattr(self, name)
            if not isinstance(value, Residence):
                raise ValueError(f"Placement.{name} must be a Residence, got {value!r}.")
        if self.optimizer is not Residence.SHARDED:
            raise ValueError("Placement.optimizer must be SHARDED: with a replicated optimizer use plain DDP instead.")
        if self.parameters is Residence.SHARDED and self.gradients is not Residence.SHARDED:
            raise ValueError("Placement with sharded parameters needs sharded gradients.")

    @property
    def shards_parameters(self) -> bool:
        """Whether full parameters exist only while their unit computes."""
        return self.parameters is Residence.SHARDED

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are reduced in every backward and kept as shards."""
        return self.gradients is Residence.SHARDED

    @classmethod
    def from_stage(cls, stage: int) -> Placement:
        """Translate a ZeRO stage number.

        Raises:
            ValueError: if ``stage`` is not 1, 2 or 3.
        """
        if stage not in _PLACEMENTS or isinstance(stage, bool):
            raise ValueError(
                f"ZeRO stage must be one of {', '.join(map(str, get_args(Stage)))}, got {stage!r}. Stage 1 shards the "
                "optimizer state, 2 also the gradients, 3 also the parameters; for none of these use strategy='ddp'."
            )
        return _PLACEMENTS[stage]


_PLACEMENTS = {
    1: Placement(parameters=Residence.REPLICATED, gradients=Residence.REPLICATED),
    2: Placement(parameters=Residence.REPLICATED, gradients=Residence.SHARDED),
    3: Placement(parameters=Residence.SHARDED, gradients=Residence.SHARDED),
}


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """What is saved, how, and where the first weights come from.

    Args:
        format: ``sharded`` writes a directory that every rank writes its own part of; ``consolidated`` one ordinary
            Lightning file, which any strategy loads without this package; not to URLs.
        async_save: let training go on while a save is written. Training waits only for a copy in host memory, which
            takes as much of it as the rank's part of the checkpoint.
        exclude_frozen: leave parameters out that do not require gradients, and say so in the checkpoint: a fine-tuning
            run then saves its adapters only. Where such a checkpoint is loaded, frozen parameters keep the values they
            have, for example from ``initial_weights``.
        verify: check every checksum before something is loaded. Sizes and structure are always checked.
        initial_weights: what the weights are before the first step: a checkpoint of this or another strategy, or a
            safetensors file or Hugging Face directory. Weights only; a run that resumes with ``ckpt_path`` loads its
            checkpoint on top.
        strict_initial_weights: whether missing, unexpected and differently shaped tensors there are errors. Otherwise
            they keep the values they were built with, and a warning names them.

    Raises:
        ValueError: naming the setting.
    """

    format: Literal["sharded", "consolidated"] = "sharded"
    async_save: bool = False
    exclude_frozen: bool = False
    verify: bool = False
    initial_weights: str | None = None
    strict_initial_weights: bool = True

    def __post_init__(self) -> None:
        if self.format not in ("sharded", "consolidated"):
            raise ValueError(f"CheckpointPolicy.format must be 'sharded' or 'consolidated', got {self.format!r}.")
        for name in ("async_save", "exclude_frozen", "verify", "strict_initial_weights"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"CheckpointPolicy.{name} must be true or false, got {getattr(self, name)!r}.")
        if self.initial_weights is not None and not (isinstance(self.initial_weights, str) and self.initial_weights):
            raise ValueError(
                f"CheckpointPolicy.initial_weights must be a path or URL as a string, got {self.initial_weights!r}."
            )

    def for_one_save(self, storage_options: Any) -> CheckpointPolicy:
        """The policy with what ``trainer.save_checkpoint(..., storage_options=...)`` overrides.

        Args:
            storage_options: ``None``, or a dictionary with ``format`` and ``async``, each optional.

        Raises:
            ValueError: for anything else, naming it.
        """
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


def validate_bucket_mib(bucket_mib: float) -> float:
    """Return ``bucket_mib`` if it is a usable bucket size in MiB.

    Raises:
        ValueError: if it is not a positive, finite number.
    """
    if isinstance(bucket_mib, bool) or not isinstance(bucket_mib, (int, float)) or not 0 < bucket_mib < float("inf"):
        raise ValueError(f"bucket_mib must be a positive number of MiB, got {bucket_mib!r}. The default is 25.")
    return float(bucket_mib)


def validate_checkpoint(checkpoint: CheckpointPolicy) -> CheckpointPolicy:
    """Return ``checkpoint`` if it is a policy.

    Raises:
        ValueError: if it is something else.
    """
    if not isinstance(checkpoint, CheckpointPolicy):
        raise ValueError(f"checkpoint must be a CheckpointPolicy, got {checkpoint!r}.")
    return checkpoint


def validate_prefetch(prefetch: int) -> int:
    """Return ``prefetch`` if it is a usable number of units.

    Raises:
        ValueError: if it is not a whole number of at least 0.
    """
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch must be a whole number of units, 0 or more, got {prefetch!r}. 0 switches it off.")
    return prefetch


def validate_units(units: object) -> tuple[str, ...] | None:
    """Return class names that become units as a tuple, or ``None`` for the automatic rule.

    Raises:
        ValueError: if it is a plain string, is empty, or holds something that is not a class name.
    """
    if units is None:
        return None
    if isinstance(units, str) or not isinstance(units, (list, tuple)):
        raise ValueError(f"units must be a list of class names such as ['Block'], got {units!r}.")
    if not units:
        raise ValueError("units must name at least one class, or be left out to find units automatically; got [].")
    for name in units:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"units must hold class names such as 'Block', got {name!r}.")
    return tuple(units)
