"""Directories of DeepSpeed's ZeRO stages 1 to 3: weights, optimizer state, and what a Trainer gave it to save.

[Note: A DeepSpeed directory]

The file ``latest`` names a folder. In it are, for each rank ``r``,

    mp_rank_00_model_states.pt                           stages 1, 2: the module as it computes, shapes, tied names
    zero_pp_rank_<r>_mp_rank_00_model_states.pt          stage 3: the same, with a part of each frozen parameter
    [bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt   what the optimizer steps, mostly in float32, and its state

In stages 1 and 2 a group's parameters lie end to end, each with its padding, and ranks have one range of that after the
other. In stage 3 each is cut into equal parts, the last one padded, and a rank's parts lie end to end; a group of the
optimizer is several such groups there. Of each of these the optimizer's state has a tensor as long as the parameters'
(in stages 1 and 2 with the padding at the end, which is cut off from these) and a step. In the universal format

    zero/optimizer_state.pt                              the optimizer's groups, and what else rank 0 had
    zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt        of each parameter; from stage 3 flat, and without a step

stand in place of the last files. State is read of optimizers that keep what Adam or SGD keep, and goes by name.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.format.record import Chunk, Opened, TensorItem, tensors_in
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import archive_entries, start_of
from lightning_zero.checkpoint.format.typed_json import DTYPES
from lightning_zero.checkpoint.storage.files import Files, is_folder, open_folder, open_range, read_bytes
from lightning_zero.errors import CheckpointError, shortened

__all__ = ["deepspeed_folder", "read_deepspeed_directory"]

_LATEST = "latest"
_LATEST_UNIVERSAL = "latest_universal"
_WHOLE_MODEL = "mp_rank_00_model_states.pt"
_MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_OPTIMIZERS = ("zero_pp_rank_{}_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt")
_UNIVERSAL = "zero/optimizer_state.pt"
_OTHERS = {
    "mp_rank_01_model_states.pt": "of model parallelism",
    "zero_pp_rank_0_mp_rank_01_model_states.pt": "of model parallelism",
    "layer_0_expert_0_mp_rank_00_model_states.pt": "of a mixture of experts",
}
_STATE = "optimizer_state_dict"
_ADAM = ("exp_avg", "exp_avg_sq")
_KEPT = ({*_ADAM}, {*_ADAM, "max_exp_avg_sq"}, {"momentum_buffer"}, set[str]())  # beside a step, by optimizers
_UNLIKE = {"max_coeff": "LAMB", "use_muon": "Muon"}  # optimizers that keep the same, by an option
# What DeepSpeed writes of itself; the rest is what the program gave it to save.
_OWN = {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
_OWN |= {"shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"}
_OWN |= {"csr_tensor_module_names", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"}
_OWN |= {"ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info"}
_NBYTES = 1 << 12  # of a tag at most

_MISSING = (
    "'{}' is not whole: '{}' is missing. DeepSpeed writes the files of a node on that node: copy all into one folder. "
    "Without ZeRO (stage 0) there are none of the optimizer, and nothing is read. The universal format is read from a "
    "local disk only."
)
_REFUSED = (
    "'{}' is a DeepSpeed checkpoint {} ('{}'): only ZeRO stages 1 to 3 alone are read. Load it with the program that "
    "wrote it, and save its weights with `torch.save(model.state_dict(), ...)`."
)


def deepspeed_folder(path: str | os.PathLike[str]) -> Files | None:
    """The files of DeepSpeed's last save there (``CheckpointError`` if that is gone), or of one save; else ``None``."""
    files, tag, latest = open_folder(path, follow_links=True), "", _LATEST
    for latest in (_LATEST, _LATEST_UNIVERSAL):
        with suppress(CheckpointError, UnicodeDecodeError):  # something else of that name
            if tag := read_bytes(files, latest, 0, min(files.size(latest), _NBYTES)).decode().strip():
                break
    names = (_WHOLE_MODEL, _MODEL.format(0), *(name.format(0) for name in _OPTIMIZERS), *_OTHERS)
    if not tag:
        return files if any(files.has(name) for name in names) else None
    place = f"{os.fspath(path).rstrip('/')}/{tag}"
    if tag not in (".", "..") and tag.isprintable() and "/" not in tag and is_folder(place):
        files = open_folder(place, follow_links=True)
        if any(files.has(name) for name in names):
            return files
    raise CheckpointError(
        f"'{os.fspath(path)}/{latest}' names the folder '{shortened(tag)}', which is not there, or holds neither "
        f"{names[0]} nor {names[1]}. Copy the files of all nodes to it, or give the folder of another save."
    )


def read_deepspeed_directory(files: Files) -> Opened:
    """What is in the folder of one save: weights, the optimizer's state, and what the program gave DeepSpeed to save.

    Trained parameters, under ``state_dict``, are those that the optimizer steps, in its dtype; buffers in 16 bit are
    made float32; what is frozen has the dtype of the module, as by DeepSpeed's ``zero_to_fp32.py``. Under
    ``optimizer_states`` is the state of the optimizer, by names; without it, ``notes`` say why.
    ``CheckpointError`` names the file that is missing, damaged, of another save or of a kind that is not read.
    """
    save = _open(files)
    model = save.models[0]
    given = {key: value for key, value in model.content.items() if key not in _OWN}
    notes: list[str] = []
    missing: list[str] = []
    try:
        state = _state_dict(model, {**save.masters(), **save.frozen()}, save.is_whole)
        try:
            given["optimizer_states"] = [_optimizer_state(save, missing)]
        except _NotKnown as error:
            notes.append(f"the state of the optimizer is not read: {error}. A run needs a new optimizer")
        if save.optimizers[0].get(_STATE).get("dynamic_loss_scale") is True:
            notes.append("the loss scale of float16 is not read. A run begins with its own")
        missing += _drop_unknown(given)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise model.unusable(f"{type(error).__name__}: {error}") from error
    given["state_dict"] = {_plain(name): value for name, value in state.items()}
    return Opened(given, [(file.name, file.digest) for file in save.opened], missing, notes)


class _NotKnown(Exception):
    """Why the state of an optimizer is not read."""


def _plain(name: str) -> str:
    return name.removeprefix("_forward_module.")  # of Lightning 2.0


def _open(files: Files) -> _Save:
    """All files of a save; ``CheckpointError`` if they are not of one."""
    for name, kind in _OTHERS.items():
        if files.has(name):
            raise CheckpointError(_REFUSED.format(files.name, kind, name))
    models, names = (_WHOLE_MODEL, _MODEL.format(0)), [name for name in _OPTIMIZERS if files.has(name.format(0))]
    names += [_UNIVERSAL] * files.has(os.path.dirname(_UNIVERSAL))
    if not names:
        raise CheckpointError(_MISSING.format(files.name, _OPTIMIZERS[0].format(0)))
    if len(names) > 1 or all(map(files.has, models)):
        raise _mixed(files, f"it has {' and '.join(names if len(names) > 1 else models)}")
    source, is_whole, universal = Source(files), files.has(_WHOLE_MODEL), names == [_UNIVERSAL]
    if not files.has(names[0].format(0)):
        raise CheckpointError(_MISSING.format(files.name, names[0]))
    first = DeepSpeedFile(files, source, names[0].format(0))
    first.content = {_STATE: first.content} if universal else first.content
    world_size = _world_size(first)
    patterns = [_MODEL] * (not is_whole) + names * (not universal)
    wanted = [_WHOLE_MODEL] * is_whole + [name.format(rank) for name in patterns for rank in range(world_size)]
    if absent := [name for name in wanted if not files.has(name)]:
        raise CheckpointError(_MISSING.format(files.name, absent[0]))
    if beyond := [name.format(world_size) for name in patterns if files.has(name.format(world_size))]:
        raise _mixed(files, f"'{beyond[0]}' is beyond the {world_size} ranks of '{first.name}'")
    modules = [DeepSpeedFile(files, source, name) for name in wanted if name.endswith("model_states.pt")]
    optimizers = [first, *(DeepSpeedFile(files, source, name) for name in wanted[len(modules) + 1 :])]
    for one in optimizers:
        if (found := _world_size(one)) != world_size:
            raise _mixed(files, f"'{one.name}' is of {found} ranks, '{first.name}' of {world_size}")
    for one in modules:
        if any(one.content.get(key) != modules[0].content.get(key) for key in ("param_shapes", "global_steps")):
            raise _mixed(files, f"'{one.name}' has other shapes or steps than '{modules[0].name}'")
    if modules[0].content.get("mp_world_size", 1) != 1 or not isinstance(modules[0].content.get("module"), dict):
        raise CheckpointError(_REFUSED.format(files.name, "of model or pipeline parallelism", modules[0].name))
    return (_Universal if universal else _Save)(files, source, modules, optimizers)


def _mixed(files: Files, what: str) -> CheckpointError:
    return CheckpointError(f"'{files.name}' is of several saves: {what}. Remove the older files, or use another save.")


def _world_size(archive: DeepSpeedFile) -> int:
    """How many ranks share the parameters, by one of their files."""
    counts = archive.get(_STATE, "partition_count", kind=(int, list))
    counts = counts if isinstance(counts, list) else [counts]
    in_groups = archive.get(_STATE).get("ds_zero_partition_groups") is not None
    if in_groups or counts != counts[:1] * len(counts) or type(counts[0]) is not int or counts[0] < 1:
        raise archive.unusable(f"groups of ranks share its parameters ({counts}), as in a mixture of experts")
    return counts[0]


def _cut(parts: Sequence[StoredTensor], begin: int, end: int) -> list[Chunk]:
    """Elements of flat tensors that lie end to end, as far as there are such."""
    found = []
    for part in parts:
        first, last = max(begin, 0), min(end, part.numel())
        for chunk in part._item.chunks if first < last else ():
            found.append(chunk._replace(numel=last - first, offset=chunk.offset + first * part.dtype.itemsize))
        begin, end = begin - part.numel(), end - part.numel()
    return found


def _tensor(source: Source, name: str, shape: Any, parts: Sequence[Tensor], chunks: Sequence[Chunk]) -> StoredTensor:
    """The tensor that chunks of parts make up; ``ValueError`` if they are not all of it."""
    ends = accumulate(chunk.numel for chunk in chunks)
    chunks = tuple(chunk._replace(start=end - chunk.numel) for chunk, end in zip(chunks, ends, strict=True))
    try:
        (dtype,) = {part.dtype for part in parts}
        return StoredTensor(source, name, TensorItem((), dtype, shape, chunks))
    except ValueError as error:
        raise ValueError(f"'{name}' cannot be put together: {error}") from error


class _Save:
    """What the ranks wrote in stages 1 to 3."""

    def __init__(
        self, files: Files, source: Source, models: list[DeepSpeedFile], optimizers: list[DeepSpeedFile]
    ) -> None:
        self.files, self.source, self.models, self.optimizers = files, source, models, optimizers
        self.opened = models + optimizers
        self.is_whole = models[0].name == _WHOLE_MODEL
        self.groups: list[dict[str, Any]] = models[0].get("param_shapes", kind=list)  # shapes by name
        self.base: tuple[str, ...] = (_STATE, "base_optimizer_state" if self.is_whole else _STATE)

    @property
    def is_dealt(self) -> bool:
        """Whether the parameters of a group were dealt to the ranks in turn, and lie in that order."""
        settings = self.models[0].content.get("ds_config")
        zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
        return self.is_whole and isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))

    def given_order(self, names: list[str]) -> list[str]:
        """The parameters of a group as they were given to the optimizer."""
        world_size = _world_size(self.optimizers[0]) if self.is_dealt else 1
        dealt = sorted(range(len(names)), key=lambda place: place % world_size)  # where each name here was given
        return [name for _, name in sorted(zip(dealt, names, strict=True))]

    def masters(self) -> dict[str, StoredTensor]:
        """The trained parameters."""
        found: dict[str, StoredTensor] = {}
        for number, (_, *parts) in enumerate(zip(self.groups, *map(self._flats, self.optimizers), strict=True)):
            found |= self._together(number, "state_dict.{}", parts)
        return found

    def _flats(self, file: DeepSpeedFile) -> list[StoredTensor]:
        """What a rank has of each group."""
        key = "single_partition_of_fp32_groups" if self.is_whole else "fp32_flat_groups"
        return list(file.get(_STATE, key, kind=list))

    def frozen(self) -> dict[str, StoredTensor]:
        """The frozen parameters of stage 3; in the others the module has them."""
        found = {}
        for name, shape in ({} if self.is_whole else self.models[0].content.get("frozen_param_shapes") or {}).items():
            parts = [model.get("frozen_param_fragments", name, kind=StoredTensor) for model in self.models]
            found[name] = _tensor(self.source, f"state_dict.{name}", shape, parts, _cut(parts, 0, math.prod(shape)))
        return found

    def state(self, number: int, step: Any) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps of the parameters of a group, by name. ``step`` counts where there is no other."""
        held = [file.get(*self.base, "state").get(number, {}) for file in self.optimizers]
        kept = [{key for key, value in one.items() if value is not None} - {"step"} for one in held]
        steps = [_step(one.get("step", step)) for one in held]
        if any(other != (kept[0], steps[0]) for other in zip(kept, steps, strict=True)):
            raise ValueError(f"of group {number} ranks keep {kept} at the steps {steps}")
        if kept[0] not in _KEPT:
            raise _NotKnown(f"it keeps {', '.join(sorted(map(str, kept[0])))}, which no optimizer does that is known")
        parts = {key: self._together(number, f"{key} of {{}}", self._parts(number, key)) for key in sorted(kept[0])}
        names = self.groups[number] if kept[0] else ()
        return {name: {**_step(steps[0].get("step")), **{key: parts[key][name] for key in parts}} for name in names}

    def _parts(self, number: int, key: str) -> list[StoredTensor]:
        """What ranks keep under a key, as long as what they have of the parameters."""
        parts = []
        for file in self.optimizers:
            part = file.get(*self.base, "state", number, key, kind=StoredTensor)
            numel = self._flats(file)[number].numel()
            if padding := (part.numel() - numel if self.is_whole else 0):
                paddings = file.get(_STATE).get("group_paddings")
                if paddings is None:
                    raise _NotKnown("it is of a DeepSpeed that does not say how it is padded")
                if padding != paddings[number]:
                    raise file.unusable(f"its {key} of group {number} has {part.numel()} elements, it steps {numel}")
                part = _tensor(self.source, key, (numel,), [part], _cut([part], 0, numel))
            parts.append(part)
        return parts

    def _together(self, number: int, label: str, parts: Sequence[StoredTensor]) -> dict[str, StoredTensor]:
        """The parameters of a group, or what is kept of them."""
        found, offset = {}, 0
        gaps = self.optimizers[0].get(_STATE).get("param_alignment_paddings")
        for place, (name, shape) in enumerate(self.groups[number].items()):
            numel = math.prod(shape)
            if self.is_whole:
                chunks = _cut(parts, offset, offset + numel)
                offset += numel + (gaps[number][place] if gaps else 0)
            else:
                each = -(-numel // len(parts))
                ends = [offset + min(each, max(0, numel - rank * each)) for rank in range(len(parts))]
                chunks = [*chain(*(_cut([part], offset, end) for part, end in zip(parts, ends, strict=True)))]
                offset += each
            found[name] = _tensor(self.source, label.format(name), shape, parts, chunks)
        numels = [part.numel() for part in parts]
        unit = 2 * len(parts)  # DeepSpeed aligns to that, and may have saved the padding
        short = -(-sum(numels) // unit) != -(-offset // unit) if self.is_whole else {*numels} != {offset}
        if short:
            raise ValueError(f"the ranks have {numels} elements of group {number}, its parameters {offset}")
        return found


class _Universal(_Save):
    """What ``ds_to_universal.py`` makes of that: files of each parameter."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        if self.is_dealt:
            raise CheckpointError(
                f"'{self.files.name}' is of a save with `round_robin_gradients`, where `ds_to_universal.py` gives "
                "elements wrong names. Use the directory that it was made of, which is read as it is."
            )
        self.base = (_STATE,) if self.is_whole else (_STATE, _STATE)

    def masters(self) -> dict[str, StoredTensor]:
        return {name: self._read(name, "fp32", shape) for group in self.groups for name, shape in group.items()}

    def state(self, number: int, step: Any) -> dict[str, dict[str, Any]]:
        found = {}
        if not self.is_whole:
            step = self.optimizers[0].get(*self.base, "state", number).get("step", step)
        for name, shape in self.groups[number].items():
            there = [self.files.has(self._path(name, key)) for key in (*_ADAM, "step")]
            if any(there) or not self.is_whole:  # otherwise it never had a gradient
                count = _step(self._open(name, "step").content if there[-1] else step)
                found[name] = {**count, **{key: self._read(name, key, shape) for key in _ADAM}}
        return found

    def _path(self, name: str, key: str) -> str:
        if "/" in name or name in (".", ".."):
            raise ValueError(f"a parameter is called '{name}'")
        return f"{os.path.dirname(_UNIVERSAL)}/{name}/{key}.pt"

    def _open(self, name: str, key: str) -> DeepSpeedFile:
        if not self.files.has(path := self._path(name, key)):
            raise CheckpointError(_MISSING.format(self.files.name, path))
        self.opened.append(file := DeepSpeedFile(self.files, self.source, path, expected=object))
        return file

    def _read(self, name: str, key: str, shape: Any) -> StoredTensor:
        file = self._open(name, key)
        value = file.get("param", kind=StoredTensor) if isinstance(file.content, dict) else file.get(kind=StoredTensor)
        if value.numel() != math.prod(shape):
            raise file.unusable(f"it has {value.numel()} elements, the parameter has the shape {tuple(shape)}")
        label = f"state_dict.{name}" if key == "fp32" else f"{key} of {name}"
        return _tensor(self.source, label, shape, [value], value._item.chunks)


def _optimizer_state(save: _Save, missing: list[str]) -> dict[str, Any]:
    """State and options of the optimizer, by names, and which are ``missing``; ``_NotKnown`` if it is not known."""
    base = save.optimizers[0].get(*save.base, kind=object)
    if not isinstance(base, dict):
        raise _NotKnown("there is none" if base is None else "it is elastic, without the options of the groups")
    saved = save.optimizers[0].get(*save.base, "param_groups", kind=list)
    if [number for group in saved for number in group["params"]] != [*range(len(save.groups))]:
        raise _NotKnown("its groups are not those of the parameters")
    state: dict[str, Any] = {}
    groups = []
    for group in saved:
        if kinds := [kind for option, kind in _UNLIKE.items() if group.get(option)]:
            raise _NotKnown(f"it is that of {kinds[0]}")
        names: list[str] = []
        for number in group["params"]:
            state.update(save.state(number, group.get("step")))
            names += save.given_order(list(save.groups[number]))
        options = {key: value for key, value in group.items() if key not in ("params", "step")}
        missing += _drop_unknown({"param_groups": options})
        groups.append({**options, "params": list(map(_plain, names))})
    return {"state": {_plain(name): values for name, values in state.items()}, "param_groups": groups}


def _step(value: Any) -> dict[str, Tensor]:
    """A step as a tensor of its own, since it is counted up in place."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"a step has the shape {tuple(value.shape)}")
    return {} if value is None else {"step": torch.tensor(float(value), dtype=torch.float32)}


def _state_dict(model: DeepSpeedFile, found: Mapping[str, StoredTensor], is_whole: bool) -> dict[str, Any]:
    """All weights, in the order of the module's. In stage 3 its parameters are empty there."""
    shared, buffers = model.content.get("shared_params") or {}, set(model.content.get("buffer_names") or ())
    state: dict[str, Any] = {}
    for name, value in model.content["module"].items():
        known, is_tensor = found.get(name, found.get(shared.get(name, name))), isinstance(value, Tensor)
        if is_tensor and known is not None and (known.shape == value.shape or not is_whole):
            state[name] = known
        elif name in found:
            raise model.unusable(f"'{name}' has another shape in `module` than in `param_shapes`")
        elif is_tensor and name in buffers and value.dtype in (torch.float16, torch.bfloat16):
            state[name] = value.float()
        elif not is_tensor or is_whole or value.numel() or name in buffers:
            state[name] = value
        elif model.content.get("frozen_param_shapes") is not None:  # frozen parameters can be excluded
            raise model.unusable(f"it does not say where the elements of '{name}' are")
    return {**state, **{name: value for name, value in found.items() if name not in state}}


def _drop_unknown(given: dict[str, Any]) -> list[str]:
    """Take what holds something of an unknown class out of a dictionary and those in it; name it."""
    missing = []
    for path, holder in [*((f"{key}.", value) for key, value in given.items() if type(value) is dict), ("", given)]:
        for name in list(holder):
            if unknown := list(tensors_in([name, holder[name]], (Unknown, UnknownType))):
                del holder[name]
                missing.append(f"'{path}{name}' ({unknown[0].origin})")
    return missing


# -------------------------------------------------------------------------------------------------------- one file

_READ_NBYTES = 1 << 12  # read at once


class UnknownType(type):
    """The class of classes that are not known."""


class Unknown(metaclass=UnknownType):
    """Takes anything, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = __init__


class DeepSpeedFile(pickle.Unpickler):
    """A file of ``torch.save`` with objects of any class in it, whose code does not run.

    ``content`` has a ``StoredTensor`` for each tensor. ``digest`` is for the ranks to compare.
    """

    def __init__(self, files: Files, source: Source, name: str, expected: type = dict) -> None:
        self.name, self.where, self.source = name, f"'{files.name}/{name}'", source
        self._file = open_range(files, name, 0, files.size(name), buffer_nbytes=_READ_NBYTES)
        self._known: dict[str, Any] = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
        self._known |= {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (OrderedDict, Counter, complex)}
        self._known["torch.Size"] = lambda sizes=(): tuple(sizes)
        self._known["torch._utils._rebuild_parameter"] = lambda data, *_: data
        self._known["torch._tensor._rebuild_from_type_v2"] = lambda rebuild, _kind, parts, _state: rebuild(*parts)
        self._known |= {f"torch._utils._rebuild_tensor_{version}": self._tensor for version in ("v2", "v3")}
        for allowed in torch.serialization.get_safe_globals():  # by the user
            kind, text = allowed if isinstance(allowed, tuple) else (allowed, "")
            self._known.setdefault(text or f"{kind.__module__}.{kind.__qualname__}", kind)
        try:
            self._entries = archive_entries(self._file)
            self._file.seek(start_of(self._file, self._entries["data.pkl"]))
            super().__init__(io.BytesIO(self._file.read(self._entries["data.pkl"].file_size)))
            self.content = self.load()
            self.digest = zlib.crc32(repr([(e.file_size, e.CRC) for e in self._entries.values()]).encode())
        except Exception as error:  # what is damaged or forged can raise anything
            raise self.unusable(f"{type(error).__name__}: {error}") from error
        self.get(kind=expected)

    def unusable(self, why: str) -> CheckpointError:
        """What to raise if the file is not what it should be."""
        return CheckpointError(
            f"{self.where} cannot be used: {shortened(why)}. It is damaged, or of a DeepSpeed of another layout: "
            "use an earlier save, or the `zero_to_fp32.py` that DeepSpeed puts beside it."
        )

    def get(self, *path: Any, kind: type | tuple[type, ...] = dict) -> Any:
        """A part of the content, of a kind; ``CheckpointError`` if there is none."""
        value = self.content
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise self.unusable(f"`{'.'.join(map(str, path))}` in it is a {type(value).__name__}")
        return value

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch") and name.endswith("Storage"):  # of a persistent id
            return name
        text = f"{module.replace('__builtin__', 'builtins')}.{name}"
        return self._known.get(text) or self._known.setdefault(text, UnknownType(name, (Unknown,), {"origin": text}))

    def persistent_load(self, reference: Any) -> tuple[torch.dtype, int, int]:
        _, kind, key, _, numel = reference[:5]
        dtype = torch.uint8 if kind == "UntypedStorage" else torch.serialization.StorageType(kind).dtype
        entry, nbytes = self._entries[f"data/{key}"], numel * dtype.itemsize
        if nbytes > entry.file_size:
            raise ValueError(f"a tensor claims {nbytes} of the {entry.file_size} bytes of '{entry.filename}'")
        return dtype, start_of(self._file, entry), nbytes

    def _tensor(self, storage: Any, start: int, shape: Sequence[int], stride: Sequence[int], *more: Any) -> Tensor:
        """In place of torch's functions that make a tensor; ``ValueError`` if it claims more than its storage holds."""
        held, offset, nbytes = storage
        dtype = more[2] if len(more) > 2 else held
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
        if min(start, span, *stride, 0) < 0 or (start + span) * dtype.itemsize > nbytes:
            raise ValueError(f"a tensor of shape {tuple(shape)} claims more than its {nbytes} bytes")
        chunks = (Chunk(0, span, self.name, offset + start * dtype.itemsize, None),) if span else ()
        if torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta").is_contiguous():
            return StoredTensor(self.source, self.name, TensorItem((), dtype, tuple(shape), chunks))
        flat = StoredTensor(self.source, self.name, TensorItem((), dtype, (span,), chunks)).read()
        return flat.as_strided(tuple(shape), tuple(stride)).contiguous()
