"""Arguments of other strategies, and what to write in their place: for those who come from there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec

from lightning_zero.errors import did_you_mean

__all__ = ["answer", "answer_foreign_names"]

_P = ParamSpec("_P")
_HERE = {  # those that most people have to replace; docs/migrating.md has them all
    "cpu_offload": "Write offload='cpu'.",
    "offload_optimizer": "Write offload=HostOffload(), or NvmeOffload('/local') for files.",
    "offload_parameters": "Write stage=3, offload=HostOffload(parameters=True).",
    "nvme_path": "Write offload=NvmeOffload('/local').",
    "auto_wrap_policy": "Write units=['Block'] with your classes, or leave it out.",
    "activation_checkpointing_policy": "Write activations=['Block'] with your classes.",
    "state_dict_type": "Write checkpoint='consolidated' for 'full', or leave it out for 'sharded'.",
    "sharding_strategy": "Write stage=3 for FULL_SHARD, stage=2 for SHARD_GRAD_OP.",
    "device_mesh": "Leave it out. For groups that share what is sharded write shard_within=8, or 'node'.",
    "mixed_precision": "Write Trainer(precision='bf16-mixed').",
    "find_unused_parameters": "Leave it out: a step may use any part of the parameters.",
    "ddp_comm_hook": "Write compression=Compression(gradients='bfloat16'), or leave it out.",
    "bucket_cap_mb": "Write bucket_mib=100.0 (stages 1 and 2).",
    "config": "Leave it out: write its settings as arguments, for example stage=3, offload='cpu'.",
    "precision": "Write Trainer(precision=...); a plugin is precision_plugin=ZeroPrecision(...).",
    "precision_plugin": "Write precision=ZeroPrecision(...) here, in Fabric.",
    "loaders": "Leave it out: in Fabric the loop is yours.",
}


def answer(name: str, known: Iterable[str] = ()) -> str:
    """What to write in the place of an argument: another strategy's, or one that is nearly one of the ``known``."""
    return f" {_HERE[name]}" if name in _HERE else did_you_mean(name, known)


def answer_foreign_names(more: Iterable[str] = ()) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """For the constructor of a strategy: ``TypeError`` for arguments that it has not, with what to write instead.

    Its signature stays what type checkers and jsonargparse read. ``more`` are names that ``**kwargs`` stands for.
    """

    def decorate(init: Callable[_P, None]) -> Callable[_P, None]:
        known = [*inspect.signature(init).parameters, *more]

        @wraps(init)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
            owner: Any = type(args[0]).__name__
            if foreign := [name for name in kwargs if name not in known]:
                told = " ".join(f"{owner} has no argument {name!r}.{answer(name, known)}" for name in foreign)
                raise TypeError(f"{told} docs/migrating.md has a row for each argument of other strategies.")
            init(*args, **kwargs)

        return checked

    return decorate
