"""What autograd keeps for the backward: computed again there, or kept on the host until then, with the same bits."""

from lightning_zero.activations.checkpointing import Checkpointing
from lightning_zero.activations.offload import SavedOnHost

__all__ = ["Checkpointing", "SavedOnHost"]
