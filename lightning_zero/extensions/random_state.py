"""Random states in checkpoints: a resumed run draws the numbers that the uninterrupted one would have drawn.

[Note: Random numbers of a resumed run]

A checkpoint holds one row of bytes for each rank, typed JSON with blanks after it:

    states   the state of each generator: "python", "numpy", "torch" (on the host), and the device's, by its type
    shared   the generators that were in one state on all ranks
    seed     of ``seed_everything``, or else of this rank's torch

At the same number of ranks each takes its own row. At another number a generator that all ranks had in common stays
in common, since ranks may rely on it: which layers are left out in a step, say, must be the same for all. Any other
begins a stream that is new to each rank. Its seed is the first 8 bytes of the SHA-256 of "seed step generator ranks
rank". So does one that was not saved, such as that of a GPU where the run was on the CPU.

The ranks that count are those with other data. Of a tensor-parallel group, which must draw the same, all take the row
of its first, unless the run that was saved had groups of as many: then each takes its own.

States are restored as late as possible, when set-up has drawn all that it draws. One thing is done too early then:
where the run resumes at the beginning of an epoch, the uninterrupted one makes the epoch's iterator over the data after
the checkpoint, and that draws numbers (a seed for workers, and one for a sampler without a generator of its own), while
Lightning makes the resumed one's before. So it is made once more, in its turn. A stream, or a loader that resumes by
itself, must not be begun twice: it keeps its iterator, and only the number that each of them draws is drawn again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.checkpoint import FlatShard
from lightning_zero.checkpoint.format.stored import read_slices
from lightning_zero.checkpoint.format.typed_json import Decoder, Encoder
from lightning_zero.comm import Groups

__all__ = ["RandomState"]

_ROW_NBYTES = 24576  # 7 kB for python, 7 kB for torch, 4 kB for numpy, next to nothing for a GPU


class RandomState:
    """Saves this rank's random number generators, and restores them. See [Note: Random numbers of a resumed run].

    ``session/checkpoints.py`` has one for each strategy.
    """

    def __init__(self, groups: Groups) -> None:
        self._control = groups.checkpoint
        self._tensor = groups.shard.tensor  # ranks of a tensor-parallel group
        self._loaded: dict[str, Any] = {}  # by generator; what was not restored yet
        self._device = torch.device("cpu")

    def save(self, device: torch.device) -> Tensor:
        """This rank's row: a FlatShard of shape (ranks, bytes), or (ranks, those of a tensor-parallel group, bytes).

        Collective: every rank.
        """
        encode = Encoder(strict=True).encode
        states: dict[str, Any] = {}

        def look() -> dict[str, str]:
            states.update({name: encode(generator.get()) for name, generator in _generators(device).items()})
            return {name: hashlib.sha256(_text(state)).hexdigest() for name, state in states.items()}

        rank, ranks = self._control.rank, self._control.world_size
        digests = self._control.together("save the state of the random number generators", look)
        shared = [name for name, digest in digests[rank].items() if all(d.get(name) == digest for d in digests)]
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        row = bytearray(_text({"seed": seed, "shared": shared, "states": states}).ljust(_ROW_NBYTES))
        groups = (ranks,) if self._tensor == 1 else (ranks // self._tensor, self._tensor)
        return FlatShard(torch.frombuffer(row, dtype=torch.uint8), (*groups, _ROW_NBYTES), rank * _ROW_NBYTES)

    def load(self, saved: Tensor, step: int, device: torch.device) -> None:
        """Read what ``save`` returned, for ``restore``; say so if some streams cannot be continued.

        The global step seeds streams that begin. Collective: every rank; ``CheckpointError`` on all, if one could not
        read its row or it is damaged.
        """
        ranks, within = saved.shape[0], math.prod(saved.shape[1:-1])
        number = self._control.world_size // self._tensor
        rank, place_within = divmod(self._control.rank, self._tensor)
        same = ranks == number
        mine = rank * within + (place_within if within == self._tensor else 0) if same else 0

        def read() -> tuple[int, list[str]]:
            row = torch.empty(saved.shape[-1], dtype=torch.uint8)
            read_slices([(saved, mine * row.numel(), row)])
            content = Decoder().decode(json.loads(bytes(row.tolist())))
            kept = [name for name in content["states"] if same or name in content["shared"]]
            generators = _generators(device)
            begun = [name for name in generators if name not in kept]
            place = f"{number} {rank}"
            self._loaded = {name: content["states"][name] for name in kept if name in generators}
            for name in begun:
                digest = hashlib.sha256(f"{content['seed']} {step} {name} {place}".encode()).digest()
                self._loaded[name] = generators[name].begin(int.from_bytes(digest[:8], "big"))
            before = {name: generator.get() for name, generator in generators.items()}
            try:
                _give(self._loaded, device)  # what cannot be restored later fails here, on all ranks
            finally:
                _give(before, device)
            return content["seed"], begun

        self._loaded, self._device = {}, device
        seed, begun = self._control.together("load the state of the random number generators", read)[0]
        kept = [name for name in self._loaded if name not in begun]
        new = f"new streams begin for {', '.join(begun)}, from the seed {seed}, the step and the rank"
        if not same:
            what = [f"{', '.join(kept)} go on, alike on all ranks"] * bool(kept) + [new] * bool(begun)
            rank_zero_info(
                f"The checkpoint is of {ranks} ranks and this run of {number}. Random numbers: {'; '.join(what)}."
            )
        elif begun:
            rank_zero_info(f"The checkpoint lacks the state of some random number generators: {new}.")

    def forget(self) -> None:
        """Restore nothing of what was loaded."""
        self._loaded = {}

    def restore(self, trainer: Trainer | None = None) -> None:
        """Restore what was loaded, if something was: when all is set up, just before training."""
        loaded, self._loaded = self._loaded, {}
        if loaded:
            _give(loaded, self._device)
            if trainer is not None:
                _begin_epoch(trainer)


class _Generator(NamedTuple):
    """A generator that everybody draws from: what gets its state, sets it, and makes that of a seed of 64 bits."""

    get: Callable[[], Any]
    give: Callable[[Any], Any]
    begin: Callable[[int], Any]


def _generators(device: torch.device) -> dict[str, _Generator]:
    """This process's generators by name; numpy's if it is there."""
    found = {
        "python": _Generator(random.getstate, random.setstate, lambda seed: random.Random(seed).getstate()),
        "torch": _Generator(torch.get_rng_state, torch.set_rng_state, lambda seed: _begun("cpu", seed)),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state, mt19937 = numpy.random.RandomState, numpy.random.MT19937
        found["numpy"] = _Generator(
            lambda: numpy.random.get_state(legacy=False),
            numpy.random.set_state,
            lambda seed: state(mt19937(seed)).get_state(legacy=False),
        )
    if device.type != "cpu":
        module = torch.get_device_module(device)
        place = () if device.type == "mps" else (device,)  # of which there is one
        found[device.type] = _Generator(
            lambda: module.get_rng_state(*place),
            lambda value: module.set_rng_state(value, *place),
            lambda seed: _begun(device, seed),
        )
    return found


def _begun(device: torch.device | str, seed: int) -> Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()


def _give(states: Mapping[str, Any], device: torch.device) -> None:
    generators = _generators(device)
    for name, state in states.items():
        generators[name].give(state)


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _begin_epoch(trainer: Trainer) -> None:
    """Draw what the iterator of an epoch draws, if the run resumes at the beginning of one.

    ``FitLoop`` has worked out already where it goes on, and has not called a hook of the epoch yet.
    """
    fit = trainer.fit_loop
    over = not fit.restarting  # the epoch before, with its hooks
    last = fit.epoch_loop.restarted_on_train_batch_end and fit.epoch_loop.batch_progress.is_last_batch
    if trainer.current_epoch == 0 or not (over or last):
        return
    loaders = fit._combined_loader.flattened if fit._combined_loader is not None else []
    may_begin_twice = all(
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
        for loader in loaders
    )
    if not may_begin_twice:
        for loader in loaders:
            if isinstance(loader, DataLoader) and loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()
    elif over:
        fit._resuming_from_checkpoint = False  # Lightning makes it, as in every epoch, after `on_train_epoch_start`
    elif fit._data_fetcher is not None:
        for loader in loaders:
            _set_sampler_epoch(loader, trainer.current_epoch)
        iter(fit._data_fetcher)
