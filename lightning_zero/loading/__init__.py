"""Weights out of a checkpoint of any kind without resuming its run: into an ordinary module, or into a dictionary.

Nothing here loads optimizer states, takes open files in place of paths, or sends tensors to different devices by
``map_location``: a module has one device here, and a sharded directory does not say where its tensors were.
"""

from lightning_zero.loading.module import let_lightning_load_directories, load_from_checkpoint, load_full_state_dict

__all__ = ["let_lightning_load_directories", "load_from_checkpoint", "load_full_state_dict"]
