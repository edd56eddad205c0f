"""Models built on the meta device: their initialisation is recorded there, and replayed for one unit at a time."""

from lightning_zero.init.record import InitRecord
from lightning_zero.init.recorder import InitRecorder

__all__ = ["InitRecord", "InitRecorder"]
