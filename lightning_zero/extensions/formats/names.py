"""Names and layouts of transformers' models and of peft's adapters: how those of files become those of a module.

Of every architecture, transformers (5.0 and later) knows how the layout of files becomes that of modules: a Mixtral's
``block_sparse_moe.experts.3.w1.weight`` is a part of ``mlp.experts.gate_up_proj``. It is asked for that. What is made
of several tensors is made when a rank reads its slice of it: a group of tensors at a time, of experts one.

peft calls the weight of a layer with an adapter ``X.base_layer.weight``; in files of the model it is ``X.weight``. It
copies a module of ``modules_to_save`` when the model is built, and computes the magnitudes of DoRA then, from weights
that ``initial_weights`` replaces later. Names and configurations show all of this, so peft is never imported.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._torch import untracked
from lightning_zero.checkpoint import StoredTensor
from lightning_zero.checkpoint.format.record import Chunk, TensorItem
from lightning_zero.checkpoint.format.stored import whole
from lightning_zero.errors import CheckpointError, some
from lightning_zero.session.state import Adapters, renamed, unwrapped

__all__ = ["adapter_names", "adapters_in", "in_layout_of", "under_names_of"]

# peft wraps layers of a base, and the base itself. In files of the base their names are without these parts.
_WRAPPED_BY_PEFT = re.compile(r"(?<![^.])(?:base_layer|original_module|token_adapter)\.")
_WRAPPED_BASE = re.compile(r"(?<![^.])base_model\.model\.")
_COPY = re.compile(r"(.+)\.(?:modules_to_save|ln_tuning_layers)\.[^.]+\.([^.].*)")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector\.[^.]+\.weight")
_TUNER = re.compile(r"(?<![^.])base_model\.(?=model\.)")
_BASE = re.compile(r"(?<![^.])base_model\.")

_ADAPTED = (
    " The module has adapters of peft: files of its base are read under names without `base_layer.`, "
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


def _base_name(name: str) -> str:
    """The name that a weight had before peft wrapped its layer."""
    return _WRAPPED_BY_PEFT.sub("", name)


def under_names_of(
    module: nn.Module, own: Collection[str], stored: Mapping[str, Any], path: str | os.PathLike[str], strict: bool
) -> dict[str, Any]:
    """The stored values under a module's names, which may be those of peft's wrappers, or of another layout."""
    names = {unwrapped(name): name for name in own}
    names = {_base_name(plain): name for plain, name in names.items()} | names
    inner = {_WRAPPED_BASE.sub("", plain, count=1): name for plain, name in names.items()} | names
    return renamed(in_layout_of(module, own, stored), (names, inner), path, strict)


def adapters_in(
    module: nn.Module,
    own: Collection[str],
    weights: Collection[str],
    stored: MutableMapping[str, Any],
    path: str | os.PathLike[str],
) -> Adapters:
    """What adapters of peft add to a module, of whose base ``stored`` has values.

    What they take from the base when they are built is added to ``stored``: copies of whole layers, and the norms of
    DoRA. ``CheckpointError`` names an adapter that would be another one on this base. ``weights`` are the names in the
    file.
    """
    names = adapter_names(module, own)
    of_a_base = not any(name in stored for name in names) and all(_base_name(name) == name for name in weights)
    stored.update(_values_from_the_base(module, own, stored))
    _refuse_dependent_adapters(module, path, [name for name in names if name not in stored])
    return Adapters(names, names if of_a_base else [], _ADAPTED if names else "")


def in_layout_of(module: nn.Module, own: Collection[str], stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stored tensors under the names of a module, if it holds a transformers model that knows how.

    Names that are the module's own stay. So do all others, unless there is exactly one model that makes most of them
    the module's. What that model says to ignore in files is left out.

    Args:
        module: models are looked for in it, but not in one another.
        own: the names of its state.
        stored: by name; on disk or not. Nothing is read.

    Returns:
        ``stored``, or another mapping, in which what has to be computed is a StoredTensor too.

    Raises:
        CheckpointError: if tensors that belong together cannot be converted, naming them.
    """
    names = {unwrapped(name) for name in own}
    names |= {_base_name(name) for name in names}
    foreign = {name: value for name, value in stored.items() if unwrapped(name) not in names}
    found = []
    for path, model in _models_of(module) if foreign else ():
        inside = {_base_name(name.removeprefix(path)) for name in names if name.startswith(path)}
        for cut in ("", path):  # as files have it, and as an older version's checkpoint of this module has it
            layout = _Layout(model, inside, {k.removeprefix(cut): v for k, v in foreign.items() if k.startswith(cut)})
            if 2 * (len(layout.taken) + len(layout.ignored)) > len(foreign):
                found.append((path, cut, layout))
                break
    if len(found) != 1:
        return stored
    ((path, cut, layout),) = found
    layout.remember()
    gone = {cut + name for name in (*layout.taken, *layout.ignored)}
    return {name: value for name, value in stored.items() if name not in gone} | {
        path + name: value for name, value in layout.converted().items()
    }


def _models_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost models of transformers in a module, with their prefixes."""
    library = sys.modules.get("transformers.modeling_utils")  # not there: the module cannot hold one
    outer: list[str] = []
    for name, child in module.named_modules() if library is not None else ():
        if isinstance(child, library.PreTrainedModel) and not name.startswith(tuple(outer)):  # type: ignore[union-attr]
            outer.append(f"{name}." if name else "")
            yield unwrapped(outer[-1]), child


class _Layout:
    """What a model makes of stored tensors: which of them become which of its own.

    Args:
        model: of transformers.
        own: the names of its state.
        stored: by name.
    """

    def __init__(self, model: Any, own: Collection[str], stored: Mapping[str, Any]) -> None:
        self._model = model
        self.taken: set[str] = set()
        self.ignored: set[str] = set()
        self._renamed: dict[str, Any] = {}
        self._groups: dict[str, _Group] = {}
        self._rules: list[Any] = []
        try:
            loading: Any = importlib.import_module("transformers.core_model_loading")
            mapping: Any = importlib.import_module("transformers.conversion_mapping")
        except ImportError:  # before 5.0, models have the layout of their files
            return
        self._rules = mapping.get_model_conversion_mapping(model)
        renamings = [rule for rule in self._rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in self._rules if isinstance(rule, loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        state, prefix = dict.fromkeys(own, True), model.base_model_prefix
        ignored = self._to_ignore()
        computed: list[Any] = []
        for key in sorted(stored, key=loading.dot_natural_key):  # experts in their order
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            if name not in state:
                if ignored is not None and ignored.search(key):
                    self.ignored.add(key)
                continue
            self.taken.add(key)
            if pattern is None:
                self._renamed[name] = stored[key]
            else:
                group = self._groups.setdefault(name, _Group(by_pattern[pattern], name, model, computed))
                group.sources.setdefault(pattern, []).append(stored[key])

    def _to_ignore(self) -> re.Pattern[str] | None:
        """What the library passes over in files of older versions."""
        patterns = set(self._model._keys_to_ignore_on_load_unexpected or ())
        buffers = [name for name, _ in self._model.named_buffers()]
        for suffix in ("rotary_emb.inv_freq", "position_ids"):
            if any(name.endswith(suffix) for name in buffers):
                patterns.add(rf"(^|\.){re.escape(suffix)}$")
        return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns))) if patterns else None

    def converted(self) -> dict[str, Any]:
        """By the model's names."""
        values = dict(self._renamed)
        for group in self._groups.values():
            values |= group.results()
        return values

    def remember(self) -> None:
        """Let the model's ``save_pretrained`` write the layout that was read."""
        self._model._weight_conversions = [rule for rule in self._rules if rule.was_used()]


class _Group:
    """Stored tensors that become one or several of a model's, computed when elements of these are read.

    ``sources`` are the tensors by pattern; ``computed`` is what was computed last, of any group, to be read again.
    """

    def __init__(self, converter: Any, name: str, model: Any, computed: list[Any]) -> None:
        self._converter, self._name, self._model, self._computed = converter, name, model, computed
        self.sources: dict[str, list[Any]] = {}

    def results(self) -> dict[str, StoredTensor]:
        """By name. Nothing is read: their shapes are found on the meta device."""
        outlines = {
            pattern: [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
            for pattern, tensors in self.sources.items()
        }
        return {name: _computed(self, name, outline) for name, outline in self._convert(outlines).items()}

    def read_elements(self, key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        """Compute what has these elements, and copy them."""
        count = self._pieces(item)
        step = math.prod(item.shape) // count
        end = start + destination.numel()
        for piece in range(start // step, -(-end // step)) if destination.numel() else ():
            part = slice(None) if count == 1 else slice(piece, piece + 1)
            if not self._computed or self._computed[:2] != [self, piece]:
                self._computed.clear()
                read = {pattern: [*map(whole, tensors[part])] for pattern, tensors in self.sources.items()}
                self._computed[:] = [self, piece, self._convert(read)]
            first, last = max(start, piece * step), min(end, (piece + 1) * step)
            elements = self._computed[2][key].reshape(-1)[first - piece * step : last - piece * step]
            destination[first - start : last - start].copy_(elements)

    def _pieces(self, item: TensorItem) -> int:
        """In how many parts along its first dimension a result can be computed, each of one tensor of every pattern."""
        stack, *rest = self._converter.operations
        count = len(next(iter(self.sources.values())))
        apart = type(stack).__name__ == "MergeModulelist" and stack.dim == 0 and all(map(_keeps_rows, rest))
        same = all(len(tensors) == count for tensors in self.sources.values())
        return count if apart and same and item.shape[:1] == (count,) else 1

    def _convert(self, sources: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for pattern, tensors in sources.items():
            for tensor in tensors:
                converter.add_tensor(self._name, pattern, pattern, tensor)
        try:
            found = converter.convert(self._name, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, IndexError, KeyError, AttributeError) as error:
            stored = [
                f"{t.key if isinstance(t, StoredTensor) else '?'} {tuple(t.shape)}"
                for tensors in self.sources.values()
                for t in tensors
            ]
            raise CheckpointError(
                f"'{self._name}' of {type(self._model).__name__} cannot be built from the stored {some(stored)}: "
                f"{error}. Are all files of the model there, and do they belong to this configuration?"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def _keeps_rows(operation: Any) -> bool:
    """Whether an operation does not mix or move what lies along the first dimension."""
    kind = type(operation).__name__
    if kind == "Concatenate":
        return bool(operation.dim > 0)
    return kind == "Transpose" and min(operation.dim0, operation.dim1) > 0 and not operation.check_dims


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
    wrapped = {name[: part.start()] for name in plain.values() for part in _WRAPPED_BY_PEFT.finditer(name)} & layers
    bases = {place[: part.end()] for place in wrapped for part in _TUNER.finditer(place)}
    models = {name[: part.start()] for name in plain.values() for part in _BASE.finditer(name)}

    def is_added(name: str) -> bool:
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            place = name[:start]
            if place in wrapped and not _WRAPPED_BY_PEFT.match(name, start):
                return True
            if place in bases and not name.startswith("model.", start):  # tables for all layers, as of VeRA
                return True
            if place in models and name.startswith("prompt_encoder.", start):
                return True
        return False

    return [name for name in own if is_added(plain[name])]


def _refuse_dependent_adapters(module: nn.Module, path: str | os.PathLike[str], missing: Collection[str]) -> None:
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


def _values_from_the_base(module: nn.Module, own: Collection[str], stored: Mapping[str, Any]) -> dict[str, Any]:
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
            added[name] = _magnitude(layer, value, magnitude.dtype, name)
    return added


def _magnitude(layer: Any, weight: Tensor, dtype: torch.dtype, key: str) -> StoredTensor:
    """The norms of a stored weight, which peft computes when elements of them are read."""
    dtype = torch.promote_types(weight.dtype, dtype)

    def norms(values: Tensor) -> Tensor:
        nothing = torch.zeros((), dtype=dtype, device=values.device)  # LoRA's product at its beginning
        found: Tensor = layer.get_weight_norm(values, nothing, 1.0)
        return found

    def read_elements(key: str, item: TensorItem, destination: Tensor, start: int) -> None:
        if destination.numel():
            with untracked():
                found = norms(whole(weight).to(dtype)).reshape(-1)
                destination.copy_(found[start : start + destination.numel()])

    outline = norms(torch.empty(weight.shape, dtype=dtype, device="meta"))
    return _computed(SimpleNamespace(read_elements=read_elements), key, outline)


def _computed(source: Any, key: str, outline: Tensor) -> StoredTensor:
    """A tensor like ``outline`` whose elements a source computes when they are read."""
    chunks = (Chunk(0, outline.numel(), key, 0, None),) if outline.numel() else ()
    return StoredTensor(source, key, TensorItem((), outline.dtype, tuple(outline.shape), chunks))
