"""Building a module with the hyper-parameters of a checkpoint, by Lightning's rules."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core import saving
from lightning.pytorch.utilities.parsing import parse_class_init_keys

__all__ = ["choose_hparams", "instantiate"]

ModelT = TypeVar("ModelT", bound=LightningModule | LightningDataModule)

# What a checkpoint may name to build its module with: LightningCLI's own function.
_INSTANTIATORS = frozenset({"lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module"})


def choose_hparams(
    checkpoint: MutableMapping[str, Any],
    model_class: Any,
    hparams_file: str | os.PathLike[str] | None,
    kwargs: Mapping[str, Any],
) -> None:
    """Put the hyper-parameters of a file and the arguments into the checkpoint, by Lightning's rules."""
    key = model_class.CHECKPOINT_HYPER_PARAMS_KEY
    if hparams_file is not None:
        suffix = os.path.splitext(os.fspath(hparams_file))[1].lower()
        if suffix == ".csv":
            checkpoint[key] = saving.load_hparams_from_tags_csv(os.fspath(hparams_file))
        elif suffix in (".yaml", ".yml"):
            checkpoint[key] = saving.load_hparams_from_yaml(os.fspath(hparams_file))
        else:
            raise ValueError(f"hparams_file must be a .csv, .yml or .yaml file, got '{os.fspath(hparams_file)}'.")
    checkpoint.setdefault(key, {})
    checkpoint[key].update(kwargs)


def instantiate(model_class: type[ModelT], checkpoint: Mapping[str, Any], kwargs: Mapping[str, Any]) -> ModelT:
    """Build the class with saved and given arguments, by Lightning's rules."""
    signature = inspect.signature(model_class.__init__)
    accepted = [name for name in signature.parameters if name not in parse_class_init_keys(model_class)]
    saved: Any = {}
    if issubclass(model_class, LightningModule):
        for old_key in saving.CHECKPOINT_PAST_HPARAMS_KEYS:
            saved.update(checkpoint.get(old_key, {}))
    saved.update(checkpoint[model_class.CHECKPOINT_HYPER_PARAMS_KEY])
    kind = checkpoint.get(model_class.CHECKPOINT_HYPER_PARAMS_TYPE)
    saved = saving._convert_loaded_hparams(saved, kind)  # private: 2.6
    as_one = checkpoint.get(model_class.CHECKPOINT_HYPER_PARAMS_NAME)
    if as_one and as_one in accepted:
        saved = {as_one: saved}
    arguments = {**saved, **kwargs}
    instantiator = _instantiator(arguments.pop("_instantiator", None), arguments.get("_class_path"), model_class)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    built: ModelT = model_class(**arguments) if instantiator is None else instantiator(model_class, arguments)
    return built


def _instantiator(name: Any, class_path: Any, model_class: type) -> Any:
    """The function that a checkpoint of LightningCLI wants to be built by.

    ``ValueError`` if it is not LightningCLI's own, or would import a class: either could run any code.
    """
    if name is None:
        return None
    # private: in some of 2.6. Users add the functions that they trust.
    if not isinstance(name, str) or name not in getattr(saving, "_ALLOWED_INSTANTIATORS", _INSTANTIATORS):
        raise ValueError(
            f"The checkpoint wants its module built by {name!r}, which is not a function of Lightning: calling it "
            "could run any code. If you trust it, add it to `lightning.pytorch.core.saving._ALLOWED_INSTANTIATORS`."
        )
    if class_path is not None:
        path, _, class_name = str(class_path).rpartition(".")
        found = getattr(sys.modules.get(path), class_name, None)  # imports nothing
        if not isinstance(found, type) or not issubclass(found, model_class):
            raise ValueError(
                f"The checkpoint was saved for {class_path!r}, which is not an imported subclass of "
                f"{model_class.__name__}. Import the module that defines it before loading."
            )
    module, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), function)
