"""Weights out of a checkpoint without resuming its run: into an ordinary module, and into a dictionary.

Both read what ``open_checkpoint`` reads: sharded directories of this package and of Lightning's own strategies,
ordinary checkpoint files, safetensors files and Hugging Face directories. None of them loads optimizer states.
Lightning's own ``load_from_checkpoint`` comes here with directories, see ``module.py``.

Not supported: open files in place of paths; ``map_location`` that sends tensors of different devices to different
places, because a module has one device here, and a sharded directory does not say where its tensors were.
"""

from lightning_zero.loading.module import let_lightning_load_directories, load_from_checkpoint
from lightning_zero.loading.weights import load_full_state_dict

__all__ = ["let_lightning_load_directories", "load_from_checkpoint", "load_full_state_dict"]
