"""Models that are asked what they would do in a run, where there is none: in ``configure_model``, for their optimizers;
and models that a Hugging Face configuration describes."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from lightning_zero.analysis import OptimizerCost

__all__ = ["attached", "configured_optimizer", "made_optimizer", "model_of"]


@contextmanager
def attached(model: LightningModule, trainer: Namespace, world_size: int) -> Iterator[None]:
    """On the meta device, with a stand-in for the Trainer that answers what most models ask of one.

    Args:
        model: that is asked.
        trainer: its configuration.
        world_size: processes of the run.
    """
    names = ("max_epochs", "max_steps", "accumulate_grad_batches", "num_nodes")
    settings = {name: trainer[name] for name in names}
    # Mostly for schedules, of which nothing counts here.
    steps = trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else 1_000
    model.trainer = SimpleNamespace(  # type: ignore[assignment]
        **settings, world_size=world_size, estimated_stepping_batches=steps, global_step=0, current_epoch=0
    )
    try:
        with torch.device("meta"):
            yield
    finally:
        model.trainer = None


def configured_optimizer(configured: Namespace) -> OptimizerCost:
    """What a configuration's ``optimizer`` costs.

    Args:
        configured: a ``class_path`` that has been looked at, perhaps with ``init_args``.
    """
    module, _, name = configured.class_path.rpartition(".")
    cls: type = getattr(importlib.import_module(module), name)  # other packages have an Adam, too
    return OptimizerCost.of(cls, **vars(configured.get("init_args") or Namespace()))  # type: ignore[no-untyped-call]


def made_optimizer(model: LightningModule, trainer: Namespace, world_size: int) -> OptimizerCost | None:
    """What the optimizer that the model makes costs, of several the one over most parameters.

    Args:
        model: that is asked. Others as for ``attached``.

    Returns:
        ``None`` if it makes none, or needs a run for it.
    """
    try:
        with attached(model, trainer, world_size), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = list(_optimizers_in(model.configure_optimizers()))
    except Exception:  # the user's code, which may ask for more of a Trainer, or for data
        return None
    return OptimizerCost.of(max(made, key=_numel)) if made else None


def _optimizers_in(found: Any) -> Iterator[Optimizer]:
    """What ``configure_optimizers`` returns has many forms."""
    if isinstance(found, Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from _optimizers_in(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _optimizers_in(part)


def _numel(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


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
