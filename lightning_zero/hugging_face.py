"""A model from a Hugging Face configuration: its structure, on the meta device, without weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["model_of"]


def model_of(path: str | Path) -> nn.Module:
    """Build the model that a configuration describes, on the meta device.

    The class is the configuration's first architecture where ``transformers`` has it, else what it makes a causal
    language model of. Nothing is downloaded, and no code that comes with a configuration is executed.

    Args:
        path: a ``config.json``, or a folder with one.

    Raises:
        ValueError: if there is no such file, it is no configuration, or ``transformers`` is not installed or does not
            know the model.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"--hf-config is a config.json or a folder with one, and {str(path)!r} is neither. Nothing is downloaded: "
            "fetch the file of a model from the Hugging Face Hub first."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"{file} has no 'model_type', so it does not describe a model of transformers.")
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.for_model(**content)
        with torch.device("meta"):
            model: nn.Module = _class_for(transformers, content, config)(config)
    except Exception as error:  # whatever the library raises for a configuration that it cannot use
        reason = str(error).partition("\n")[0]
        raise ValueError(f"transformers cannot build the model of {file}: {type(error).__name__}: {reason}") from error
    return model


def _transformers() -> Any:
    """The library, which this package does not depend on."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"--hf-config needs the package `transformers` ({error}). Install it with `pip install transformers`, or "
            "give --parameters."
        ) from error


def _class_for(transformers: Any, content: dict[str, Any], config: Any) -> Any:
    for name in content.get("architectures") or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):  # any name may stand in a file
            return found
    return transformers.AutoModelForCausalLM.from_config
