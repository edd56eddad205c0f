"""Steps on masters in host memory and in files are, bit for bit, the steps on whole parameters."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import AdamW8bit
from lightning_zero.config import Tier
from lightning_zero.errors import OffloadError, UnsupportedOptimizerError
from lightning_zero.extensions.nvme.files import FileTensor, fill_from
from lightning_zero.extensions.nvme.store import NvmeStore
from lightning_zero.optim.rules import check_offloadable
from tests.helpers.rig import SMALLEST, Rig, Whole, looking
from tests.helpers.stores import Disk, fail
from tests.helpers.world import run_world
from tests.world.optim.test_optimizers import ELEMENTWISE, FUSED

optim = torch.optim
Make = Callable[[list[nn.Parameter]], Optimizer]
StoreOf = Callable[..., NvmeStore]


@pytest.fixture
def store_of(tmp_path: Path) -> Iterator[StoreOf]:
    opened: list[NvmeStore] = []

    def make(nbytes: int = SMALLEST, **settings: Any) -> NvmeStore:
        settings = {"rank": 0, "io_threads": 2, "device": torch.device("cpu"), **settings}
        opened.append(NvmeStore(str(tmp_path), buffer_nbytes=nbytes, **settings))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
    assert not list(tmp_path.iterdir())


def two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.003}]


def variants() -> dict[str, Make]:
    """Each optimizer fused where torch can, else all parameters at once or one after the other."""
    found: dict[str, Make] = {}
    for place, (name, (cls, options)) in enumerate(ELEMENTWISE.items()):
        flag = {"fused": True} if name in FUSED else {"foreach": True} if place % 2 else {}
        found[name] = lambda p, c=cls, o={**options, **flag}: c(two_groups(p), **o)
    return found


@pytest.mark.parametrize("name", variants())
def test_host_and_disk_are_exact(name: str, store_of: StoreOf) -> None:
    make = variants()[name]
    always = name == "sgd momentum"  # torch's cannot take a parameter whose first gradient comes late
    whole = Whole(make, always=always)
    rigs = [Rig(make, Tier.HOST, rank, 3, always=always) for rank in range(3)]
    rigs += [Rig(make, Tier.DISK, rank, 2, store_of(), always=always) for rank in range(2)]
    rigs += [Rig(make, Tier.DISK, 0, 1, store_of(), always=always)]
    for step in range(4):
        whole.step(step)
        for rig in rigs:
            rig.step(step)
    assert {f"{rig.tier} {rig.rank} of {rig.world_size}": whole.unlike(rig) for rig in rigs} == {
        f"{rig.tier} {rig.rank} of {rig.world_size}": [] for rig in rigs
    }
    for rig in rigs:
        assert rig.stepped == [0, 1, 2] * 4
        assert rig.agreed in ([None] * 4, [None] * 5)  # on disk once more, for the room of the state
        if rig.tier is Tier.DISK:
            assert all(torch.equal(flat.weights, flat.master.read()) for flat in rig.flats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_8_bits_in_ranges(dtype: torch.dtype, rig_of: RigOf) -> None:
    """Ranges of 1024 elements on the host, none of which cuts a block; not in files."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return AdamW8bit(two_groups(parameters), lr=0.01)

    whole, rigs = Whole(make, dtype), [Rig(make, Tier.HOST, rank, 3, dtype=dtype) for rank in range(3)]
    for step in range(4):
        whole.step(step)
        for rig in rigs:
            rig.step(step)
    assert [whole.unlike(rig) for rig in rigs] == [[], [], []]
    assert sum("exp_avg_codes" in state for state in whole.optimizer.state.values()) == 3
    with pytest.raises(UnsupportedOptimizerError, match=r"AdamW8bit cannot update 'unit0\.p0', which NvmeOffload"):
        rig_of(make, Tier.DISK)


TIERS = [Tier.HOST, Tier.DISK]


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return optim.Adam(two_groups(parameters), lr=0.01)


@pytest.fixture
def rig_of(store_of: StoreOf) -> Callable[..., Rig]:
    """A rig on either tier, with the least memory for windows."""

    def make(make: Make, tier: Tier, *args: Any, **settings: Any) -> Rig:
        return Rig(make, tier, *args, store=store_of() if tier is Tier.DISK else None, **settings)

    return make


Counting = Callable[[list[nn.Parameter]], Any]
RigOf = Callable[..., Rig]


@pytest.mark.parametrize("tier", TIERS)
def test_state_that_comes_later(tier: Tier, rig_of: RigOf) -> None:
    """Momentum switched on in the middle: nobody could know of the buffer when the room for state was reserved."""

    def sgd(parameters: list[nn.Parameter]) -> Optimizer:
        return optim.SGD(two_groups(parameters), lr=0.05, momentum=0.0)

    whole, rig = Whole(sgd), rig_of(sgd, tier)
    for step in range(4):
        for optimizer in (whole.optimizer, rig.optimizer):
            for group in optimizer.param_groups:
                group["momentum"] = 0.9 if step >= 2 else 0.0
        whole.step(step)
        rig.step(step)
    assert any(whole.optimizer.state.values())
    assert whole.unlike(rig) == []


@pytest.mark.parametrize("tier", TIERS)
def test_a_group_added_later(tier: Tier, rig_of: RigOf) -> None:
    def first(parameters: list[nn.Parameter]) -> Optimizer:
        return optim.AdamW(parameters[:2], lr=0.01)

    whole, rig = Whole(first), rig_of(first, tier)
    for step in range(4):
        if step == 2:
            for optimizer, parameters in ((whole.optimizer, whole.parameters), (rig.optimizer, rig.parameters)):
                optimizer.add_param_group({"params": parameters[2:], "lr": 0.1})
        whole.step(step)
        rig.step(step)
    assert whole.unlike(rig) == []
    assert rig.stepped == [0, 0, 0, 1, 2, 0, 1, 2]


def move(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(1))


EDITS: list[Callable[[list[dict[str, Any]]], Any]] = [
    move,
    lambda groups: groups.reverse(),
    lambda groups: groups.pop(),
]


@pytest.mark.parametrize("tier", TIERS)
def test_groups_that_the_user_changes(tier: Tier, rig_of: RigOf) -> None:
    """Parameters move from one to the other, groups change places, and go."""
    whole, rig = Whole(adam), rig_of(adam, tier)
    for step in range(4):
        for optimizer in (whole.optimizer, rig.optimizer):
            if step:
                EDITS[step - 1](optimizer.param_groups)
        whole.step(step)
        rig.step(step)
        assert whole.unlike(rig) == []
    names = [entry.name for entry in rig.owned.values()]
    left = [names[i] for i, p in enumerate(whole.parameters) if p in set(whole.optimizer.param_groups[0]["params"])]
    assert sorted(entry.name for entry in rig.adapter.groups[0]) == sorted(left)
    assert list(rig.adapter.units) == sorted({entry.unit for entry in rig.adapter.groups[0]})


def amsgrad(parameters: list[nn.Parameter]) -> Optimizer:
    return optim.Adam(two_groups(parameters), lr=0.01, amsgrad=True)


def test_parameters_of_16_bit_are_cut_for_one_thread_only(counting: Counting) -> None:
    """Torch's kernels round otherwise where what a thread gets ends. In a process that forks no others."""

    def run(rank: int) -> list[int]:
        found = []
        for threads in (1, 3):
            rig = Rig(counting, Tier.HOST, threads=threads, dtype=torch.bfloat16, always=True)
            rig.optimizer.most = 0
            rig.step(0)
            found.append(rig.optimizer.most)
        return found

    assert run_world(1, run, init_group=False) == [[1024, 12345]]


# ---------------------------------------------------------------------------------------------------------------------
# What is seen of a step from outside


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """It notes how many threads it is run with and the elements of a parameter, and raises when told to."""

    def make(parameters: list[nn.Parameter]) -> Any:
        def count(group: dict[str, Any]) -> None:
            if any(p.grad is not None for p in group["params"]):
                optimizer.threads.add(torch.get_num_threads())
                optimizer.most = max(optimizer.most, *(p.numel() for p in group["params"]), 0)
                optimizer.fail_in -= 1
                if optimizer.fail_in == 0:
                    raise ArithmeticError("made to fail")

        optimizer = looking(monkeypatch, torch.optim.Adam(two_groups(parameters), lr=0.01), count)
        optimizer.threads, optimizer.fail_in, optimizer.most = set(), float("inf"), 0
        return optimizer

    return make


@pytest.mark.parametrize("tier", TIERS)
def test_threads_of_the_step(tier: Tier, tmp_path: Path, counting: Counting) -> None:
    """In a process of its own: one that has computed with several threads cannot fork others any more."""

    def run(rank: int) -> list[int]:
        store = NvmeStore(str(tmp_path), rank=0, buffer_nbytes=SMALLEST, io_threads=1, device=torch.device("cpu"))
        rig = Rig(counting, tier, store=store, threads=3)
        rig.optimizer.threads.clear()
        rig.step(0)
        found = [*rig.optimizer.threads, torch.get_num_threads()]
        rig.optimizer.fail_in = 1
        with pytest.raises(OffloadError):
            rig.step(1)
        store.close()
        return [*found, torch.get_num_threads()]

    assert run_world(1, run, init_group=False) == [[3, 1, 1]]


# ---------------------------------------------------------------------------------------------------------------------
# Failures


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fail_in", [1, 3, 5])
def test_an_optimizer_that_raises_publishes_all_units_and_agrees(
    tier: Tier, fail_in: int, rig_of: RigOf, counting: Counting
) -> None:
    """So that no other rank waits for this one; and nothing temporary is left."""
    rig = rig_of(counting, tier)
    rig.step(0)
    agreements = len(rig.agreed)
    rig.stepped.clear()
    rig.optimizer.fail_in = fail_in
    with pytest.raises(OffloadError, match="made to fail"):
        rig.step(1)
    assert rig.stepped == [0, 1, 2]
    assert [type(failure) for failure in rig.agreed[agreements:]] == [ArithmeticError]
    shards = [entry.parameter for entry in rig.owned.values()]
    assert any(shard.grad is not None for shard in shards)
    users = {id(parameter) for parameter in rig.parameters}
    assert {id(p) for group in rig.optimizer.param_groups for p in group["params"]} == users
    assert {id(p) for p in rig.optimizer.state} <= users
    assert {id(p) for p in rig.adapter.state} <= {id(shard) for shard in shards}
    rig.adapter.abandon()
    rig.stepped.clear()
    rig.optimizer.fail_in = float("inf")
    rig.step(2)
    assert rig.stepped == [0, 1, 2]


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_disk_that_breaks_in_a_step(kind: str, store_of: StoreOf) -> None:
    disk = Disk()
    rig = Rig(adam, Tier.DISK, store=store_of(system=disk))
    rig.step(0)
    rig.stepped.clear()
    disk.before = fail(kind, errno.EIO)
    with pytest.raises(OffloadError, match=f"Rank 0.*{kind[:4]}.*Input/output error"):
        rig.step(1)
    assert rig.stepped == [0, 1, 2]
    disk.before = None
    rig.adapter.abandon()


@pytest.mark.parametrize("adam", [adam, lambda p: optim.Adagrad(two_groups(p), lr=0.1)], ids=["lazy", "eager"])
def test_a_disk_without_room_for_the_state_is_noticed_at_set_up(adam: Make, store_of: StoreOf) -> None:
    disk = Disk()
    store = store_of(system=disk)
    # 104,192 bytes of state for Adagrad, twice that for Adam, and the rest of each region's last page.
    with pytest.raises(OffloadError, match=r"(119|238) kB are needed and 1 kB are free"):
        Rig(adam, Tier.DISK, store=store, adapt=lambda optimizer: setattr(disk, "free", 1000))
    disk.free, disk.full = None, False
    with pytest.raises(OffloadError, match="No space left"):
        Rig(adam, Tier.DISK, store=store, adapt=lambda optimizer: setattr(disk, "full", True))


class Muon(torch.optim.Muon):
    """Only matrices."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__([p for p in parameters if p.ndim == 2], lr=0.1)


REFUSED: dict[str, tuple[Make, Tier, str]] = {
    "muon in files": (Muon, Tier.DISK, "Muon needs whole parameters .* Use HostOffload"),
    "capturable": (lambda p: optim.Adam(p, capturable=True), Tier.HOST, "capturable=False, or leave `offload` out"),
    "differentiable": (lambda p: optim.SGD(p, differentiable=True), Tier.DISK, "differentiable=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_be_stepped_on_there(name: str, rig_of: RigOf) -> None:
    make, tier, message = REFUSED[name]
    with pytest.raises(UnsupportedOptimizerError, match=message):
        rig_of(make, tier)


# ---------------------------------------------------------------------------------------------------------------------
# State that is loaded, and files that are used again


@pytest.mark.parametrize("tier", TIERS)
def test_state_goes_from_one_tier_to_the_other(tier: Tier, rig_of: RigOf) -> None:
    """By name, as a checkpoint does it; options that say how to step stay those of the run."""
    whole, source = Whole(adam), rig_of(adam, Tier.HOST if tier is Tier.DISK else Tier.DISK, 1, 2)
    for step in range(2):
        whole.step(step)
        source.step(step)
    target = rig_of(adam, tier, 1, 2)
    for ours, theirs in zip(target.owned.values(), source.owned.values(), strict=True):
        fill_from(ours.data, theirs.data)
    groups = [{**group, "lr": 0.5, "capturable": True} for group in source.optimizer.param_groups]
    for optimizer in (whole.optimizer, source.optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.5
    state = source.adapter.named_state()
    for values in state.values():
        values.values.update({key: value.clone() for key, value in values.values.items()})
        if tier is Tier.DISK:
            values.slices.update({key: value.clone() for key, value in values.slices.items()})
    target.adapter.load_named_state(state, groups)
    assert whole.unlike(target) == []
    slices = [v for state in target.adapter.state.values() for v in state.values() if v.dim() and v.numel()]
    assert {type(value) for value in slices} == {FileTensor if tier is Tier.DISK else Tensor}
    for rig in (source, target):
        rig.step(2)
    whole.step(2)
    assert whole.unlike(source) == whole.unlike(target) == []


def test_a_second_fit_uses_the_files_of_the_first(store_of: StoreOf) -> None:
    rig = Rig(adam, Tier.DISK, store=store_of())
    for step in range(2):
        rig.step(step)
    room = rig.store.nbytes_on_disk
    rig.adapter.retire()
    assert not rig.optimizer.state
    rig.adapt(adam(rig.parameters))
    whole = Whole(adam)
    for step in range(2):
        whole.step(step)
    whole.optimizer = adam(whole.parameters)
    for step in range(2, 4):
        whole.step(step)
        rig.step(step)
    assert whole.unlike(rig) == []
    assert rig.store.nbytes_on_disk == room


def test_groups_that_cannot_be_stepped_on(rig_of: RigOf) -> None:
    rig = rig_of(adam, Tier.HOST)
    first, second = rig.optimizer.param_groups
    second["params"].append(nn.Parameter(torch.zeros(7)))
    with pytest.raises(ValueError, match=r"param group 1, holds a parameter of shape \(7,\)"):
        rig.step(0)
    second["params"][-1] = first["params"][0]
    with pytest.raises(ValueError, match=r"'unit0.p0' twice, in param groups 0 and 1"):
        rig.step(0)


@pytest.mark.parametrize("tier", TIERS)
def test_publishing_that_fails_is_not_tried_again(tier: Tier, rig_of: RigOf) -> None:
    """The wire is broken then: to go on with collectives would only hang."""
    rig = rig_of(adam, tier)
    agreements = len(rig.agreed)
    rig.broken = 1, ConnectionError("lost the others")
    with pytest.raises(ConnectionError, match="lost the others"):
        rig.step(0)
    assert rig.stepped == [0, 1]
    assert len(rig.agreed) == agreements


def test_whole_matrices_on_the_host_of_an_accelerator_are_refused() -> None:
    muon = Muon([nn.Parameter(torch.zeros(2, 2))])
    for tier in Tier:
        check_offloadable(muon, "Muon", "whole", Tier.DEVICE, torch.device("cuda"))
        check_offloadable(muon, "Muon", "elementwise", tier, torch.device("cuda"))
    check_offloadable(muon, "Muon", "whole", Tier.HOST, torch.device("cpu"))
    with pytest.raises(UnsupportedOptimizerError, match="put together on the cuda device, where offload"):
        check_offloadable(muon, "Muon", "whole", Tier.HOST, torch.device("cuda"))


@pytest.mark.parametrize("tier", TIERS)
def test_state_that_the_user_puts_into_the_optimizer(tier: Tier, rig_of: RigOf) -> None:
    """With torch's own ``load_state_dict``, and by clearing it."""
    whole, rig = Whole(adam), rig_of(adam, tier)
    saved: list[dict[str, Any]] = []
    for step in range(4):
        for optimizer in (whole.optimizer, rig.optimizer):
            if step == 1:
                saved.append(copy.deepcopy(optimizer.state_dict()))
            if step == 2:
                optimizer.load_state_dict(saved.pop(0))
            if step == 3:
                optimizer.state.clear()
        whole.step(step)
        rig.step(step)
    assert whole.unlike(rig) == []
