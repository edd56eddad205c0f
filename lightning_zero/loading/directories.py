"""Lightning's own ``load_from_checkpoint`` for checkpoints that are directories.

``LightningModule.load_from_checkpoint`` hands its path to one private function, which opens a file. A directory ends
there, before a module or a strategy is asked, so there is no seam and this function is wrapped: a path where a
checkpoint directory lies goes to our loader, and everything else goes on as it came.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from lightning.pytorch.core import datamodule, module

from lightning_zero.checkpoint import is_checkpoint_directory_at
from lightning_zero.loading.module import LoadSettings, load_with

__all__ = ["let_lightning_load_directories"]

_NAME: Final = "_load_from_checkpoint"  # private: 2.6


class _Loader:
    """What Lightning calls in place of its own function.

    Args:
        original: Lightning's function.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(
        self,
        cls: Any,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``load_from_checkpoint``."""
        if isinstance(checkpoint_path, (str, os.PathLike)) and is_checkpoint_directory_at(checkpoint_path):
            settings = LoadSettings(map_location, hparams_file, strict, weights_only)
            return load_with(cls, checkpoint_path, kwargs, settings)
        return self._original(cls, checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)


def let_lightning_load_directories() -> None:
    """Make ``load_from_checkpoint`` of Lightning's modules and data modules take directories, too. Once is enough."""
    for place in (module, datamodule):
        original = getattr(place, _NAME, None)
        if original is not None and not isinstance(original, _Loader):
            setattr(place, _NAME, _Loader(original))
