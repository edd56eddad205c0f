"""Directories that DeepSpeed writes in ZeRO stages 1 to 3: their weights, and what a Trainer gave it to save.

[Note: A DeepSpeed directory]

The file ``latest`` names a folder. In it are, for each rank ``r``,

    mp_rank_00_model_states.pt                           stages 1, 2: the module as it computes, shapes, tied names
    zero_pp_rank_<r>_mp_rank_00_model_states.pt          stage 3: the same, with a part of each frozen parameter
    [bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt   what the optimizer steps, mostly in float32

In stages 1 and 2 a group's parameters lie end to end, each with its padding, and ranks have one range of that after the
other. In stage 3 each is cut into equal parts, the last one padded, and a rank's parts lie end to end. The files are
pickles: plain data is made, a tensor becomes ranges of files, and any other name a class that does nothing.
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

from lightning_zero.checkpoint.format.claims import archive_entries, check_expanded, check_torch_file
from lightning_zero.checkpoint.format.items import Opened, tensors_in
from lightning_zero.checkpoint.format.record import Chunk, TensorItem
from lightning_zero.checkpoint.format.stored import Source, StoredTensor
from lightning_zero.checkpoint.format.torch_file import start_of
from lightning_zero.checkpoint.format.typed_json import DTYPES
from lightning_zero.checkpoint.storage.files import Files, is_folder, open_folder, read_bytes
from lightning_zero.checkpoint.storage.ranges import open_range
from lightning_zero.errors import CheckpointError, shortened

__all__ = ["LATEST_FILE", "deepspeed_folder", "read_deepspeed_directory"]

LATEST_FILE = "latest"
_WHOLE_MODEL = "mp_rank_00_model_states.pt"
_MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_OPTIMIZERS = ("zero_pp_rank_{}_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt")
_OTHERS = {
    "mp_rank_01_model_states.pt": "of model parallelism",
    "zero_pp_rank_0_mp_rank_01_model_states.pt": "of model parallelism",
    "layer_0_expert_0_mp_rank_00_model_states.pt": "of a mixture of experts",
    "zero": "in the universal format",
}
_STATE = "optimizer_state_dict"
# What DeepSpeed writes of itself; the rest is what the program gave it to save.
_OWN = {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
_OWN |= {"shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"}
_OWN |= {"csr_tensor_module_names", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"}
_OWN |= {"ds_version", "checkpoint_parallel_dimensions"}
_NBYTES = 1 << 12  # of a tag at most, and read at once

_MISSING = (
    "'{}' is not whole: '{}' is missing. DeepSpeed writes the files of a node on that node: copy all into one folder. "
    "Without ZeRO (stage 0) there are none of the optimizer, and nothing is read."
)
_REFUSED = (
    "'{}' is a DeepSpeed checkpoint {} ('{}'): only ZeRO stages 1 to 3 alone are read. Load it with the program that "
    "wrote it, and save its weights with `torch.save(model.state_dict(), ...)`."
)


def deepspeed_folder(path: str | os.PathLike[str]) -> Files | None:
    """The files of DeepSpeed's last save there (``CheckpointError`` if that is gone), or of one save; else ``None``."""
    files, tag = open_folder(path, follow_links=True), ""
    with suppress(CheckpointError, UnicodeDecodeError):  # something else of that name
        tag = read_bytes(files, LATEST_FILE, 0, min(files.size(LATEST_FILE), _NBYTES)).decode().strip()
    names = (_WHOLE_MODEL, _MODEL.format(0), *(name.format(0) for name in _OPTIMIZERS), *_OTHERS)
    if not tag:
        return files if any(files.has(name) for name in names[:-1]) else None
    place = f"{os.fspath(path).rstrip('/')}/{tag}"
    if tag not in (".", "..") and tag.isprintable() and "/" not in tag and is_folder(place):
        files = open_folder(place, follow_links=True)
        if any(files.has(name) for name in names):
            return files
    raise CheckpointError(
        f"'{os.fspath(path)}/{LATEST_FILE}' names the folder '{shortened(tag)}', which is not there, or holds neither "
        f"{names[0]} nor {names[1]}. Copy the files of all nodes to it, or give the folder of another save."
    )


def read_deepspeed_directory(files: Files) -> Opened:
    """What is in the folder of one save: weights under ``state_dict``, and what the program gave DeepSpeed to save.

    Trained parameters are those that the optimizer steps, in its dtype; buffers in 16 bit are made float32; what is
    frozen has the dtype of the module, as by DeepSpeed's ``zero_to_fp32.py``. The optimizer's state is left out.
    ``CheckpointError`` names the file that is missing, damaged, of another save or of a kind that is not read.
    """
    models, optimizers = _open_all(files)
    is_whole = models[0].name == _WHOLE_MODEL
    given = {key: value for key, value in models[0].content.items() if key not in _OWN}
    try:
        state = _state_dict(models[0], (_of_flat_groups if is_whole else _of_parts)(models, optimizers), is_whole)
        state = {name.removeprefix("_forward_module."): value for name, value in state.items()}  # of Lightning 2.0
        missing = _drop_unknown(given)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise models[0].unusable(f"{type(error).__name__}: {error}") from error
    return Opened({**given, "state_dict": state}, [(file.name, file.digest) for file in models + optimizers], missing)


class _Name(type):
    """The class of classes that are not known."""


class _Unknown(metaclass=_Name):
    """Takes anything, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = __init__


class _Archive(pickle.Unpickler):
    """A file of ``torch.save``: its content, with a ``StoredTensor`` for each tensor, and a digest."""

    def __init__(self, files: Files, source: Source, name: str) -> None:
        self.name, self.where, self.source = name, f"'{files.name}/{name}'", source
        self._file = open_range(files, name, 0, files.size(name), buffer_nbytes=_NBYTES)
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
            check_torch_file(self._file, mapped=True)
            self._entries = archive_entries(self._file)
            self._file.seek(start_of(self._file, self._entries["data.pkl"]))
            super().__init__(io.BytesIO(self._file.read(self._entries["data.pkl"].file_size)))
            self.content = self.load()
            self.digest = zlib.crc32(repr([(e.file_size, e.CRC) for e in self._entries.values()]).encode())
        except Exception as error:  # what is damaged or forged can raise anything
            raise self.unusable(f"{type(error).__name__}: {error}") from error
        self.get()

    def unusable(self, why: str) -> CheckpointError:
        """What to raise if the file is not what it should be."""
        return CheckpointError(
            f"{self.where} cannot be used: {shortened(why)}. It is damaged, or of a DeepSpeed of another layout: "
            "use an earlier save, or the `zero_to_fp32.py` that DeepSpeed puts beside it."
        )

    def get(self, *path: str, kind: type | tuple[type, ...] = dict) -> Any:
        """A part of the content, of a kind; ``CheckpointError`` if there is none."""
        value = self.content
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise self.unusable(f"`{'.'.join(path)}` in it is a {type(value).__name__}")
        return value

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch") and name.endswith("Storage"):  # of a persistent id
            return name
        text = f"{module.replace('__builtin__', 'builtins')}.{name}"
        return self._known.get(text) or self._known.setdefault(text, _Name(name, (_Unknown,), {"origin": text}))

    def persistent_load(self, reference: Any) -> tuple[torch.dtype, int, int]:
        _, kind, key, _, numel = reference[:5]
        dtype = torch.uint8 if kind == "UntypedStorage" else torch.serialization.StorageType(kind).dtype
        return dtype, start_of(self._file, self._entries[f"data/{key}"]), numel * dtype.itemsize

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
        check_expanded([strided := flat.as_strided(tuple(shape), tuple(stride))])
        return strided.contiguous()


def _open_all(files: Files) -> tuple[list[_Archive], list[_Archive]]:
    """The files with the module and those with the optimizer, by rank; ``CheckpointError`` if they are no one save."""
    for name, kind in _OTHERS.items():
        if files.has(name):
            raise CheckpointError(_REFUSED.format(files.name, kind, name))
    models, names = (_WHOLE_MODEL, _MODEL.format(0)), [name for name in _OPTIMIZERS if files.has(name.format(0))]
    if not names:
        raise CheckpointError(_MISSING.format(files.name, _OPTIMIZERS[0].format(0)))
    if len(names) > 1 or all(map(files.has, models)):
        raise _mixed(files, f"it has {' and '.join(_OPTIMIZERS if len(names) > 1 else models)}")
    source, is_whole = Source(files), files.has(_WHOLE_MODEL)
    first = _Archive(files, source, names[0].format(0))
    world_size = _world_size(first)
    patterns = names if is_whole else [_MODEL, *names]
    wanted = [_WHOLE_MODEL] * is_whole + [name.format(rank) for name in patterns for rank in range(world_size)]
    if absent := [name for name in wanted if not files.has(name)]:
        raise CheckpointError(_MISSING.format(files.name, absent[0]))
    if beyond := [name.format(world_size) for name in patterns if files.has(name.format(world_size))]:
        raise _mixed(files, f"'{beyond[0]}' is beyond the {world_size} ranks of '{first.name}'")
    opened = [_Archive(files, source, name) for name in wanted]
    for one in opened[-world_size:]:
        if (found := _world_size(one)) != world_size:
            raise _mixed(files, f"'{one.name}' is of {found} ranks, '{first.name}' of {world_size}")
    for one in opened[:-world_size]:
        if any(one.content.get(key) != opened[0].content.get(key) for key in ("param_shapes", "global_steps")):
            raise _mixed(files, f"'{one.name}' has other shapes or steps than '{opened[0].name}'")
    if opened[0].content.get("mp_world_size", 1) != 1 or not isinstance(opened[0].content.get("module"), dict):
        raise CheckpointError(_REFUSED.format(files.name, "of model or pipeline parallelism", opened[0].name))
    return opened[:-world_size], opened[-world_size:]


def _mixed(files: Files, what: str) -> CheckpointError:
    return CheckpointError(f"'{files.name}' is of several saves: {what}. Remove the older files, or use another save.")


def _world_size(archive: _Archive) -> int:
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


def _of_flat_groups(models: Sequence[_Archive], optimizers: Sequence[_Archive]) -> dict[str, StoredTensor]:
    """The trained parameters of stages 1 and 2."""
    held = [archive.get(_STATE, "single_partition_of_fp32_groups", kind=list) for archive in optimizers]
    paddings = optimizers[0].get(_STATE).get("param_alignment_paddings")
    found: dict[str, StoredTensor] = {}
    for number, (group, *parts) in enumerate(zip(models[0].get("param_shapes", kind=list), *held, strict=True)):
        offset = 0
        for place, (name, shape) in enumerate(group.items()):
            end = offset + math.prod(shape)
            found[name] = _tensor(models[0].source, name, shape, parts, _cut(parts, offset, end))
            offset = end + (paddings[number][place] if paddings else 0)
        numel, unit = sum(part.numel() for part in parts), 2 * len(parts)
        if -(-numel // unit) != -(-offset // unit):  # DeepSpeed aligns to that, and may have saved the padding
            raise ValueError(f"the ranks have {numel} elements of group {number}, its parameters {offset}")
    return found


def _of_parts(models: Sequence[_Archive], optimizers: Sequence[_Archive]) -> dict[str, StoredTensor]:
    """The trained and the frozen parameters of stage 3."""
    first, held, offset = models[0], [archive.get(_STATE, "fp32_flat_groups", kind=list) for archive in optimizers], 0
    found: dict[str, StoredTensor] = {}
    for name, shape in chain(*(group.items() for group in first.get("param_shapes", kind=list))):
        numel = math.prod(shape)
        each = -(-numel // len(held))
        ends = [offset + min(each, max(0, numel - rank * each)) for rank in range(len(held))]
        chunks = chain(*(_cut(flats, offset, end) for flats, end in zip(held, ends, strict=True)))
        found[name] = _tensor(first.source, name, shape, list(chain(*held)), list(chunks))
        offset += each
    for archive, flats in zip(optimizers, held, strict=True):
        if sum(flat.numel() for flat in flats) != offset:
            raise archive.unusable(f"it does not hold the {offset} elements that a rank has of all parameters")
    for name, shape in (first.content.get("frozen_param_shapes") or {}).items():
        parts = [model.get("frozen_param_fragments", name, kind=StoredTensor) for model in models]
        found[name] = _tensor(first.source, name, shape, parts, _cut(parts, 0, math.prod(shape)))
    return found


def _state_dict(model: _Archive, found: Mapping[str, StoredTensor], is_whole: bool) -> dict[str, Any]:
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
            if unknown := list(tensors_in([name, holder[name]], (_Unknown, _Name))):
                del holder[name]
                missing.append(f"'{path}{name}' ({unknown[0].origin})")
    return missing
