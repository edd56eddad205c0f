"""What autograd keeps for the backward: how much it is, computed again there, or on the host until then."""

from lightning_zero.activations.checkpointing import Checkpointing
from lightning_zero.activations.measure import ActivationBytes, measure_activations
from lightning_zero.activations.offload import SavedOnHost

__all__ = ["ActivationBytes", "Checkpointing", "SavedOnHost", "measure_activations"]
