"""Adapters of peft in a module: the names of what they wrap, and the values that they take from it.

peft calls the weight of a layer with an adapter ``X.base_layer.weight``; in files of the model it is ``X.weight``. It
copies a module of ``modules_to_save`` when the model is built, and computes the magnitudes of DoRA then, from weights
that ``initial_weights`` replaces later. The names are enough to see all of this, so peft is never imported.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import StoredTensor
from lightning_zero.checkpoint.format.record import Chunk, TensorItem
from lightning_zero.errors import CheckpointError, some
from lightning_zero.session.names import WRAPPED_BY_PEFT, models_of, unwrapped

__all__ = ["ADAPTED", "adapter_names", "described_models", "refuse_dependent_adapters", "values_from_the_base"]

_COPY = re.compile(r"(.+)\.(?:modules_to_save|ln_tuning_layers)\.[^.]+\.([^.].*)")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector\.[^.]+\.weight")
_TUNER = re.compile(r"(?<![^.])base_model\.(?=model\.)")
_BASE = re.compile(r"(?<![^.])base_model\.")

ADAPTED = (
    "The module has adapters of peft: files of its base are read under names without `base_layer.`, "
    "`original_module.` and `base_model.model.`."
)

# Kinds of adapters whose first values do not depend on the weights of the base; found by building each on two bases.
_INDEPENDENT = frozenset(
    (
        *("LORA", "ADALORA", "LOHA", "LOKR", "VERA", "PVERA", "RANDLORA", "GRALORA", "VBLORA", "UNILORA", "HIRA"),
        *("BOFT", "OFT", "HRA", "IA3", "C3A", "FOURIERFT", "BEFT", "LILY", "POLY", "GLORA", "PEANUT"),
        *("LN_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING"),
    )
)
_INDEPENDENT_VALUES = (True, False, None, "gaussian", "orthogonal", "RANDOM")


def adapter_names(module: nn.Module, own: Collection[str]) -> list[str]:
    """The names of what adapters add to a module: all that lies beside a part that peft has wrapped.

    Args:
        module: with adapters or without.
        own: the names of its state.
    """
    layers = {
        unwrapped(f"{name}." if name else "")
        for name, child in module.named_modules()
        if hasattr(type(child), "adapter_layer_names")  # so does peft mark its layers; others may have a `base_layer`
    }
    plain = {name: unwrapped(name) for name in own}
    wrapped = {name[: part.start()] for name in plain.values() for part in WRAPPED_BY_PEFT.finditer(name)} & layers
    bases = {place[: part.end()] for place in wrapped for part in _TUNER.finditer(place)}
    models = {name[: part.start()] for name in plain.values() for part in _BASE.finditer(name)}

    def is_added(name: str) -> bool:
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            place = name[:start]
            if place in wrapped and not WRAPPED_BY_PEFT.match(name, start):
                return True
            if place in bases and not name.startswith("model.", start):  # tables for all layers, as of VeRA
                return True
            if place in models and name.startswith("prompt_encoder.", start):
                return True
        return False

    return [name for name in own if is_added(plain[name])]


def refuse_dependent_adapters(module: nn.Module, path: str | os.PathLike[str], missing: Collection[str]) -> None:
    """Make sure that adapters without stored values would be the same on any base: ``CheckpointError`` names others."""
    if not missing:
        return
    for name, child in module.named_modules():
        configs = getattr(child, "peft_config", None)
        for adapter, config in configs.items() if isinstance(configs, Mapping) else ():
            why = _dependence(config)
            if why:
                raise CheckpointError(
                    f"Adapter '{adapter}' of '{name or type(child).__name__}' cannot begin with the initial weights "
                    f"'{os.fspath(path)}': with {why} peft computes the adapter from the base when the module is "
                    f"built, before these weights are read ({some(missing)}). Load the base with `from_pretrained` "
                    "before you add the adapter, and leave `initial_weights` out."
                )


def _dependence(config: Any) -> str:
    """The setting that makes an adapter's first values those of a certain base; empty if none does."""
    kind = getattr(config, "peft_type", None)
    kind = str(getattr(kind, "value", kind))
    if kind not in _INDEPENDENT:
        return f"peft_type={kind}"
    for key in ("init_lora_weights", "prompt_tuning_init"):
        value = getattr(config, key, None)
        value = getattr(value, "value", value)
        if value not in _INDEPENDENT_VALUES:
            return f"{key}={value!r}"
        if value is False and getattr(config, "use_dora", False):
            return f"{key}=False and use_dora=True"
    return "trainable_token_indices" if getattr(config, "trainable_token_indices", None) else ""


def values_from_the_base(module: nn.Module, own: Collection[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """What adapters take from the base when they are built: copies of whole layers, and the norms of DoRA.

    Args:
        module: with adapters or without.
        own: the names of its state.
        stored: values under these names.

    Returns:
        Values for names that are not stored; on disk like the others, or computed when they are read.
    """
    parameters = {unwrapped(key): (key, value) for key, value in module.named_parameters(remove_duplicate=False)}
    buffers = {unwrapped(key): (key, value) for key, value in module.named_buffers(remove_duplicate=False)}
    tensors = parameters | buffers
    values = {unwrapped(name): value for name, value in stored.items()}
    twins = {id(tensors[name][1]): value for name, value in values.items() if name in tensors}  # of a tied weight
    added = {}
    for name in own:
        plain = unwrapped(name)
        copied, scaled = _COPY.fullmatch(plain), _MAGNITUDE.fullmatch(plain)
        places = [f"{copied[1]}.{at}.{copied[2]}" for at in ("original_module", "base_layer")] if copied else []
        places += [f"{scaled[1]}.base_layer.weight"] if scaled else []
        there = [twins.get(id(tensors[place][1])) for place in places if place in tensors]
        value = next((value for value in there if value is not None), None)
        if value is None or plain in values:
            continue
        if copied:
            added[name] = value
        elif plain in tensors:
            key, magnitude = tensors[plain]
            layer = module.get_submodule(key.rpartition(".")[0])
            added[name] = _Magnitude(layer, value, magnitude.dtype).tensor(name)
    return added


def described_models(module: nn.Module) -> list[dict[str, Any]]:
    """What a checkpoint says of the models of transformers and the adapters of peft in it, to build them again."""
    peft = sys.modules.get("peft")  # not there: the module cannot hold one
    wrappers: dict[str, Any] = {}
    for name, child in module.named_modules() if peft is not None else ():
        if isinstance(child, peft.PeftModel):  # type: ignore[union-attr]
            wrappers[unwrapped(f"{name}." if name else "")] = child
    described = []
    for prefix, model in models_of(module):
        adapted = next((at for at in wrappers if prefix in (f"{at}base_model.model.", f"{at}base_model.")), None)
        configs = {} if adapted is None else wrappers[adapted].peft_config
        generation = getattr(model, "generation_config", None)
        try:
            described.append(
                {
                    "prefix": prefix,
                    "class": type(model).__name__,
                    "config": model.config.to_json_string(),
                    "generation_config": None if generation is None else generation.to_json_string(),
                    "adapted": adapted,
                    "adapters": {name: json.dumps(each.to_dict(), default=list) for name, each in configs.items()},
                }
            )
        except (TypeError, ValueError):  # a configuration that cannot be written; the checkpoint can
            continue
    return described


class _Magnitude:
    """The norms of a stored weight, computed by peft when elements of them are read."""

    def __init__(self, layer: Any, weight: Tensor, dtype: torch.dtype) -> None:
        self._layer, self._weight = layer, weight
        self._dtype = torch.promote_types(weight.dtype, dtype)

    def tensor(self, key: str) -> StoredTensor:
        """What is read where ``key`` would be."""
        outline = self._norms(torch.empty(self._weight.shape, dtype=self._dtype, device="meta"))
        chunks = (Chunk(0, outline.numel(), key, 0, None),)
        return StoredTensor(self, key, TensorItem((), outline.dtype, tuple(outline.shape), chunks))

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """Compute all norms, and copy these."""
        if destination.numel():
            weight = self._weight.read() if isinstance(self._weight, StoredTensor) else self._weight
            with untracked():
                norms = self._norms(weight.to(self._dtype)).reshape(-1)
                destination.copy_(norms[start : start + destination.numel()])

    def _norms(self, weight: Tensor) -> Tensor:
        nothing = torch.zeros((), dtype=weight.dtype, device=weight.device)  # LoRA's product at its beginning
        norms: Tensor = self._layer.get_weight_norm(weight, nothing, 1.0)
        return norms
