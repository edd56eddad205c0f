"""Folders that ``from_pretrained`` of transformers and peft load, written by these libraries from a checkpoint.

A checkpoint says which models it holds, with their configurations (``MODELS_KEY``). The model is built again in this
process, so that its own code decides about names and files. Neither library is imported for anything else.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.format.stored import StoredTensor
from lightning_zero.errors import CheckpointError, some

__all__ = ["MODELS_KEY", "PretrainedFormat", "refuse_wrapped_names", "write_pretrained"]

PretrainedFormat = Literal["huggingface", "peft"]
MODELS_KEY = "models"
_BY_HAND = "In Python, `load_from_checkpoint(MyModule, ...)` gives a module whose models you can save yourself."
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal")  # of LoRA, which leave the base as it is


def write_pretrained(
    checkpoint: Mapping[str, Any],
    source: str | os.PathLike[str],
    target: Path,
    kind: PretrainedFormat,
    *,
    prefix: str | None,
    base: str | os.PathLike[str] | None,
    dtype: torch.dtype | None,
    max_shard_size: int,
) -> list[Path]:
    """Write a model with its adapters merged into it (``"huggingface"``), or its adapters alone (``"peft"``).

    Args:
        checkpoint: with its partition.
        source: where it lies, for messages.
        target: a folder, of which files of the same names are replaced.
        kind: what to write.
        prefix: the model's name in the module, if there are several.
        base: a folder or name for ``from_pretrained``, for frozen weights that were not saved.
        dtype: of the weights; as they were saved if not given.
        max_shard_size: of a file with weights, in bytes.

    Raises:
        CheckpointError: if the checkpoint does not say what it holds, or not all weights are there.
        ValueError: for settings that are wrong, and if a library is not installed.
    """
    model = _RecordedModel(checkpoint, source, prefix)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        if kind == "peft":
            model.save_adapters(folder, base, dtype)
        else:
            model.merged(base, dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        written = []
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            final = target / path.relative_to(folder)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)
            written.append(final)
    return written


def refuse_wrapped_names(names: Mapping[str, Any], prefix: str) -> None:
    """``ValueError`` if ``from_pretrained`` would not find these weights, cut off ``prefix``, as peft wrapped them."""
    parts = {"base_layer", "original_module"}
    wrapped = [name for name in names if not parts.isdisjoint(name.split("."))]
    if wrapped and "base_model" in prefix.split("."):
        raise ValueError(
            f"prefix={prefix!r} leaves names that peft has changed, such as '{wrapped[0]}': `from_pretrained` would "
            "initialise those layers anew. Use format='huggingface' for the model with its adapters merged into it, or "
            "format='peft' for the adapters alone."
        )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"This format is written by {name}, which is not installed: `pip install {name}`.") from error


class _RecordedModel:
    """A model of transformers in a checkpoint, with the adapters of peft around it."""

    def __init__(self, checkpoint: Mapping[str, Any], source: str | os.PathLike[str], prefix: str | None) -> None:
        own = checkpoint.get("lightning_zero", {})
        models = own.get("plan", {}).get(MODELS_KEY, [])
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
            saved |= {key: _read(value, dtype) for key, value in self._state.items() if id(value) in ids}
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
        wrong = [f"not there are {some(missing)}"] * bool(missing) + [f"unknown are {some(unexpected)}"] * bool(
            unexpected
        )
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


def _read(value: Any, dtype: torch.dtype | None) -> Tensor:
    whole: Tensor = value.read() if isinstance(value, StoredTensor) else value
    return whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
