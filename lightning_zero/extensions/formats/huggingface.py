"""Directories as Hugging Face has them: safetensors, or what ``from_pretrained`` of transformers and peft loads.

Safetensors are ``model.safetensors``, or several files with an index. They are read and written here.

What ``from_pretrained`` loads has a configuration too, and is written by these libraries from a checkpoint. It says
which models it holds, with their configurations (`described_models`). The model is built again in this process, so that
its own code decides about names and files. Neither library is imported for anything else.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.consolidated import Export, with_holes, write_export
from lightning_zero.checkpoint.format.record import Opened
from lightning_zero.checkpoint.format.stored import Source, StoredTensor, whole
from lightning_zero.checkpoint.format.torch_file import Hole, Place
from lightning_zero.checkpoint.format.typed_json import dtype_name, is_plain, strict_json
from lightning_zero.checkpoint.storage.files import Files, read_index
from lightning_zero.checkpoint.storage.publish import StagedFile, is_checkpoint_directory
from lightning_zero.errors import CheckpointError, some
from lightning_zero.extensions.formats.safetensors import (
    DAMAGES,
    SAFETENSORS_DTYPES,
    open_safetensors,
    read_safetensors,
)

__all__ = ["INDEX_FILE", "SINGLE_FILE", "SafetensorsFile", "export_weights", "is_weights", "read_safetensors_directory"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")


def read_safetensors_directory(files: Files) -> Opened:
    """What is in such a directory: the files that its index names, or its only one.

    ``CheckpointError`` names the file if it is not whole.
    """
    if not files.has(INDEX_FILE):
        return read_safetensors(files, SINGLE_FILE)
    where = f"'{files.name}/{INDEX_FILE}'"
    index = read_index(files, INDEX_FILE)
    try:
        places: dict[str, str] = strict_json(index)["weight_map"]
        for key, name in places.items():
            if type(name) is not str or name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
                raise ValueError(f"'{key}' lies in the file {name!r}, which is not a plain file name")
    except DAMAGES as error:
        raise CheckpointError(f"{where} cannot be used: {type(error).__name__}: {error}.") from error
    opened = {name: open_safetensors(files, name) for name in sorted(set(places.values()))}
    source, state = Source(files), {}
    for key, name in places.items():
        if key not in opened[name][1]:
            raise CheckpointError(f"{where} says that '{key}' is in '{name}', which does not hold it.")
        state[key] = StoredTensor(source, key, opened[name][1][key])
    return Opened({"state_dict": state}, zlib.crc32(b"".join([index, *(header for header, _ in opened.values())])))


def export_weights(settings: Export) -> list[Path]:
    """Write a folder that ``from_pretrained`` loads, or safetensors alone: a folder of them, or one file."""
    if not settings.is_one_file:
        _check_folder(settings)
    if settings.kind == "safetensors":
        return _write_safetensors(settings)
    written = _write_pretrained(settings)
    _delete_old_weights(settings.target, {path.name for path in written})
    return written


def _check_folder(settings: Export) -> None:
    target = settings.target
    is_folder = target.is_dir()
    if is_folder and (names := os.listdir(target)) and is_checkpoint_directory(names):
        raise ValueError(f"'{target}' is a sharded checkpoint: write to another directory.")
    if os.path.lexists(target) and not is_folder:
        raise ValueError(
            f"'{target}' is a file, and without a suffix OUT is a directory of safetensors: give another name, "
            "one with a suffix such as '.ckpt' or '.safetensors' for a file, or delete it."
        )
    there = sorted(name for name in os.listdir(target) if is_weights(name)) if is_folder else []
    if there and not settings.overwrite:
        raise settings.exists(target / there[0])


def is_weights(name: str) -> bool:
    """Whether a file in a directory is one of those that hold weights, or say where they are."""
    return name == INDEX_FILE or _WEIGHTS.fullmatch(name) is not None


def _write_safetensors(settings: Export) -> list[Path]:
    target, (holes, aliases) = settings.target, _holes_of(settings)
    if settings.is_one_file:
        write_export(settings, {target: SafetensorsFile(holes, {"format": "pt", **aliases})}, holes)
        return [target]
    shards = _shards(holes, settings.limit)
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    files = {}
    for name, shard in zip(names if len(shards) > 1 else [SINGLE_FILE], shards, strict=True):
        metadata = {"format": "pt", **{alias: name for alias, name in aliases.items() if name in shard}}
        files[target / name] = SafetensorsFile(shard, metadata)
    write_export(settings, files, holes, lambda staged: _publish(target, staged, shards))
    return [*files] if len(files) == 1 else [*files, target / INDEX_FILE]


def _holes_of(settings: Export) -> tuple[dict[str, Hole], dict[str, str]]:
    """A hole for every weight that safetensors can hold, once if it is tied, and the other names of tied ones."""
    weights = settings.weights()
    wrapped = [name for name in weights if not {"base_layer", "original_module"}.isdisjoint(name.split("."))]
    if wrapped and "base_model" in (settings.prefix or "").split("."):
        raise ValueError(
            f"prefix={settings.prefix!r} leaves names that peft has changed, such as '{wrapped[0]}': `from_pretrained` "
            "would initialise those layers anew. Use format='huggingface' for the model with its adapters merged into "
            "it, or format='peft' for the adapters alone."
        )
    tensors = {name: value for name, value in weights.items() if isinstance(value, StoredTensor) or is_plain(value)}
    if left_out := [name for name in weights if name not in tensors]:
        warnings.warn(f"Left out, because safetensors hold plain tensors only: {', '.join(left_out)}.", stacklevel=4)
    holes = {name: with_holes(value, settings.dtype or value.dtype) for name, value in tensors.items()}
    first: dict[Any, str] = {}
    for name, hole in holes.items():
        first.setdefault((hole.key, hole.shape), name)
    kept = {name: first[hole.key, hole.shape] for name, hole in holes.items()}
    return {name: holes[name] for name in first.values()}, {name: one for name, one in kept.items() if one != name}


_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class SafetensorsFile:
    """Where everything lies in a file of these tensors.

    Args:
        tensors: by name. Those of wide dtypes come first in the file, so that every element is aligned; otherwise the
            order is kept.
        metadata: text by name, for readers.

    Raises:
        ValueError: if a dtype has no name in this format, naming the tensor.

    Attributes:
        head: the first bytes of the file.
        places: of every tensor, in the order of the file.
        nbytes: size of the whole file.
    """

    def __init__(self, tensors: Mapping[str, Hole], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        begins: list[tuple[Hole, int]] = []
        for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            if spec.dtype not in _NAMES:
                raise ValueError(f"'{name}' is of {dtype_name(spec.dtype)}, which a safetensors file cannot hold")
            begins.append((spec, end))
            offsets = [end, end := end + spec.nbytes]
            header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        data = len(self.head)
        self.places = [Place(hole.key, hole.tensor, hole.dtype, data + begin, hole.nbytes) for hole, begin in begins]
        self.nbytes = len(self.head) + end

    def frame(self, _: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Everything but the elements, as of ``TorchFile``; this format has no checksums."""
        yield 0, self.head
        yield from ((at.offset + at.nbytes, b"") for at in self.places)


def _publish(folder: Path, staged: Sequence[StagedFile], shards: Sequence[Mapping[str, Hole]]) -> None:
    """Give the files their names. While they are of two exports, there is no index that leads to them."""
    index = folder / INDEX_FILE
    if len(staged) > 1:
        index.unlink(missing_ok=True)
    for file in staged:
        file.publish()
    if len(staged) > 1:
        total = sum(hole.nbytes for shard in shards for hole in shard.values())
        places = {name: file.final.name for file, shard in zip(staged, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode() + b"\n"
        written = StagedFile(index, len(text))
        try:
            written.path.write_bytes(text)
            written.publish()
        finally:
            written.discard()
    else:
        index.unlink(missing_ok=True)
    _delete_old_weights(folder, {INDEX_FILE, *(file.final.name for file in staged)})


def _delete_old_weights(folder: Path, current: Collection[str]) -> None:
    """Delete the files of an earlier export in other pieces."""
    for path in folder.iterdir():
        if is_weights(path.name) and path.name not in current:
            path.unlink()


def _shards(holes: Mapping[str, Hole], limit: int) -> list[dict[str, Hole]]:
    """The tensors in files of at most ``limit`` bytes of elements, in their order; at least one file."""
    shards: list[dict[str, Hole]] = [{}]
    filled = 0
    for name, hole in holes.items():
        if filled and filled + hole.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = hole
        filled += hole.nbytes
    return shards


# ---------------------------------------------------------------------------------- what from_pretrained loads

_BY_HAND = "In Python, `load_from_checkpoint(MyModule, ...)` gives a module whose models you can save yourself."
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal")  # of LoRA, which leave the base as it is


def _write_pretrained(settings: Export) -> list[Path]:
    """Write a model with its adapters merged into it (``"huggingface"``), or its adapters alone (``"peft"``).

    Files of the same names in the folder are replaced.

    Raises:
        CheckpointError: if the checkpoint does not say what it holds, or not all weights are there.
        ValueError: for settings that are wrong, and if a library is not installed.
    """
    target, base = settings.target, settings.base
    model = _RecordedModel(settings.checkpoint, settings.source, settings.prefix)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        if settings.kind == "peft":
            model.save_adapters(folder, base, settings.dtype)
        else:
            model.merged(base, settings.dtype).save_pretrained(folder, max_shard_size=settings.limit)
        written = []
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            final = target / path.relative_to(folder)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)
            written.append(final)
    return written


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"This format is written by {name}, which is not installed: `pip install {name}`.") from error


class _RecordedModel:
    """A model of transformers in a checkpoint, with the adapters of peft around it."""

    def __init__(self, checkpoint: Mapping[str, Any], source: str | os.PathLike[str], prefix: str | None) -> None:
        own = checkpoint.get("lightning_zero", {})
        models = own.get("plan", {}).get("models", [])
        if not models:
            raise CheckpointError(
                f"'{os.fspath(source)}' does not say which model it holds: no model of transformers was in the module, "
                f"or another strategy or an earlier release saved it. {_BY_HAND}"
            )
        given = None if prefix is None else prefix.removesuffix(".") + "."
        known = {name: model for model in models for name in (model["prefix"], model["adapted"]) if name is not None}
        chosen = models if given is None else [known[given]] if given in known else []
        if len(chosen) != 1:
            raise ValueError(f"Which model is meant? Give prefix (--prefix) one of {some(map(repr, known), 9)}.")
        (record,) = chosen
        self._source = os.fspath(source)
        self._class_name: str = record["class"]
        self._config: dict[str, Any] = json.loads(record["config"])
        self._generation: str | None = record["generation_config"]
        self._adapters: dict[str, Any] = {name: json.loads(text) for name, text in record["adapters"].items()}
        root = record["prefix"] if record["adapted"] is None else record["adapted"]
        state = checkpoint["state_dict"]
        self._state = {name.removeprefix(root): value for name, value in state.items() if name.startswith(root)}
        self._left_out = bool(own.get("excluded_frozen"))

    def merged(self, base: str | os.PathLike[str] | None, dtype: torch.dtype | None) -> Any:
        """The whole model, without adapters."""
        if len(self._adapters) > 1:
            raise CheckpointError(
                f"'{self._source}' holds several adapters ({some(self._adapters)}), of which one has to be chosen. "
                f"{_BY_HAND}"
            )
        wrapped, model = self._built(base, on_meta=False)
        self._load(wrapped, set() if base is None else {id(value) for value in model.parameters()})
        if self._adapters:
            if not hasattr(wrapped, "merge_and_unload"):
                raise CheckpointError(
                    f"The adapter in '{self._source}' ({self._kind()}) cannot be merged into the model. Write it "
                    "alone, with format='peft' (--format peft)."
                )
            _untie_what_is_wrapped(wrapped)
            model = wrapped.merge_and_unload(safe_merge=True)
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            if getattr(model.config, "tie_word_embeddings", False) and head is not None:
                model.config.tie_word_embeddings = torch.equal(head.weight, embedding.weight)  # one may have trained
        return model.to(dtype or self._dtype(model))

    def save_adapters(self, folder: str, base: str | os.PathLike[str] | None, dtype: torch.dtype | None) -> None:
        """Write the adapters as peft does."""
        if not self._adapters:
            raise CheckpointError(
                f"'{self._source}' holds a {self._class_name} without adapters of peft. Use format='huggingface' "
                "(--format huggingface)."
            )
        peft = _library("peft")
        prompts = any(config.get("num_virtual_tokens") for config in self._adapters.values())
        wrapped, model = self._built(None, on_meta=not prompts)  # of prompts, peft asks the module for values
        for config in wrapped.peft_config.values():
            config.base_model_name_or_path = config.base_model_name_or_path if base is None else os.fspath(base)
        if prompts:
            self._load(wrapped, {id(value) for value in model.parameters()})
            (wrapped if dtype is None else wrapped.to(dtype)).save_pretrained(folder)
            return
        saved: dict[str, Tensor] = {}
        for name in self._adapters:
            needed = peft.get_peft_model_state_dict(wrapped, adapter_name=name)
            there = peft.get_peft_model_state_dict(wrapped, state_dict=self._state, adapter_name=name)
            self._complain([key for key in needed if key not in there], [])
            ids = {id(value) for value in there.values()}
            saved |= {key: whole(value, dtype) for key, value in self._state.items() if id(value) in ids}
        wrapped.save_pretrained(folder, state_dict=saved)

    def _built(self, base: str | os.PathLike[str] | None, on_meta: bool) -> tuple[Any, Any]:
        """The model with its adapters, and the model in it."""
        model_class = getattr(_library("transformers"), self._class_name, None)
        if model_class is None:
            raise CheckpointError(
                f"transformers has no class {self._class_name}, which '{self._source}' holds. {_BY_HAND}"
            )
        starts = [config.get("init_lora_weights", True) for config in self._adapters.values()]
        if base is not None and any(start not in _PLAIN_STARTS for start in starts):
            raise CheckpointError(
                f"The adapter in '{self._source}' began with init_lora_weights={starts[0]!r}, which changes the base "
                f"itself: '{os.fspath(base)}' is not the base that it was trained on. {_BY_HAND}"
            )
        with ExitStack() as building:
            if on_meta:
                building.enter_context(torch.device("meta"))
            if base is None:
                model = model_class(model_class.config_class.from_dict(self._config))
            else:
                model = self._pretrained(model_class, base)
            if self._generation is not None:
                generation = _library("transformers").GenerationConfig
                model.generation_config = generation.from_dict(json.loads(self._generation))
            wrapped = model.eval()
            for number, (name, settings) in enumerate(self._adapters.items()):
                peft = _library("peft")
                config = peft.PeftConfig.from_peft_type(**settings)
                if number:
                    wrapped.add_adapter(name, config)
                else:
                    wrapped = peft.get_peft_model(model, config, adapter_name=name)
        return wrapped, model

    def _pretrained(self, model_class: Any, base: str | os.PathLike[str]) -> Any:
        try:
            config = model_class.config_class.from_dict(self._config)
            model, told = model_class.from_pretrained(base, config=config, output_loading_info=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"The base '{os.fspath(base)}' cannot be loaded: {error}") from error
        random = [*told["missing_keys"], *(row[0] for row in told["mismatched_keys"])]
        if random:
            raise CheckpointError(
                f"The base '{os.fspath(base)}' does not hold all weights of a {self._class_name}: {some(random)}. "
                f"Name the model that the adapter in '{self._source}' was trained on."
            )
        return model

    def _load(self, wrapped: nn.Module, known: set[int]) -> None:
        """Read all weights into the model; of those in ``known`` the values may be there."""
        try:
            missing, unexpected = wrapped.load_state_dict(self._state, strict=False)
        except RuntimeError as error:
            raise CheckpointError(
                f"The weights in '{self._source}' do not fit its {self._class_name}, or not the base: {error}"
            ) from error
        own = wrapped.state_dict(keep_vars=True)
        read = {id(value) for name, value in own.items() if name in self._state}
        self._complain([name for name in missing if id(own[name]) not in known | read], unexpected)

    def _complain(self, missing: list[str], unexpected: list[str]) -> None:
        if not missing and not unexpected:
            return
        base = " It was saved without frozen parameters: name their model with base (--base)." * self._left_out
        wrong = [f"not there are {some(missing)}"] * bool(missing)
        wrong += [f"unknown are {some(unexpected)}"] * bool(unexpected)
        raise CheckpointError(
            f"The weights in '{self._source}' are not those of its {self._class_name}"
            f"{f' with adapters ({self._kind()})' if self._adapters else ''}: {'; '.join(wrong)}.{base}"
        )

    def _kind(self) -> str:
        return some(config["peft_type"] for config in self._adapters.values())

    def _dtype(self, model: nn.Module) -> torch.dtype:
        """What most of its weights were saved in."""
        counts: dict[torch.dtype, int] = {}
        for value in self._state.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
        trained_alone = self._left_out or not counts
        found: torch.dtype = model.dtype if trained_alone else max(counts, key=lambda dtype: counts[dtype])  # type: ignore[assignment]
        return found


def _untie_what_is_wrapped(model: nn.Module) -> None:
    """Let a head keep its weight when an adapter is merged into the embedding that it shares it with."""
    places: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(value), []).append(name)
    for names in places.values():
        if any("base_layer" in name.split(".") for name in names):
            for name in names[1:]:
                place, _, attribute = name.rpartition(".")
                owner = model.get_submodule(place)
                setattr(owner, attribute, nn.Parameter(getattr(owner, attribute).detach().clone(), False))
