"""What a parameter is while it is sharded: this rank's slice of a flat buffer, and what stands in the user's hands."""

from lightning_zero.shards.slice import FlatParameters, ParameterShard, Placeholders
from lightning_zero.shards.sliced_tensor import SlicedTensor

__all__ = ["FlatParameters", "ParameterShard", "Placeholders", "SlicedTensor"]
