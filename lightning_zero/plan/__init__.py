"""What is decided before training: units, flat buffers, shards, buckets, slots, and the memory tier of each.

Numbers only: works on meta tensors, needs no process group, is equal on all ranks, and proves itself. What plans return
to users can be imported from here.
"""

from lightning_zero.plan.plan import CollectiveTraffic, Traffic

__all__ = ["CollectiveTraffic", "Traffic"]
