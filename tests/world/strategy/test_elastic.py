"""A checkpoint of any stage at any world size resumes in any other."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_zero import ZeroPrecision
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup
from lightning_zero.optim.gradients import LossScaler
from tests.helpers.resumed import WIDTH, Everything, run
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import STAGES, _differences, quiet, raised, zero
from tests.helpers.world import run_world

WORLDS = (1, 2, 3)
# Sums over 12 rows in another order, through a step of AdamW.
BOUND = 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """What each (world, stage) did, by rank, and where it saved, under ``"path"``."""
    root = tmp_path_factory.mktemp("saved")

    def save(rank: int, world: int) -> dict[str, Any]:
        with quiet():
            return {
                name: run(zero(stage), Everything(), save=root / f"{world} {name}", epochs=2)
                for name, stage in STAGES.items()
            }

    found = {}
    for world in WORLDS:
        results = run_world(world, save, world)
        for name in STAGES:
            found[world, name] = [{**result[name], "path": root / f"{world} {name}"} for result in results]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_every_checkpoint_resumes_at_this_world(world: int, saved: Any) -> None:
    """Bitwise what was saved; then the uninterrupted run, bit for bit at the same world size, else within rounding.

    One stage follows each, another one for every pair of world sizes: three of the nine pairs of stages each time, and
    every pair of stages at three pairs of world sizes.
    """
    stages = list(STAGES)

    def resume(rank: int) -> list[str]:
        wrong, cut = [], set[str]()
        for (old_world, old_stage), expected in saved.items():
            name = stages[(stages.index(old_stage) + WORLDS.index(world) + WORLDS.index(old_world)) % 3]
            strategy = zero(STAGES[name])
            with quiet():
                result = run(strategy, Everything(seed=5), resume=expected[0]["path"], epochs=2)
            if name == "stage 3" and world > 1:
                cut.update(
                    n
                    for n, shard in strategy.engine.shards.items()
                    if shard.start and shard.data.numel() and shard.start % shard.spec.shape[-1]
                )
            at = f"saved at {old_world}, {old_stage}; resumed at {world}, {name}"
            wrong += _differences(expected[0]["at"], result["at"], 0.0, f"{at}: restored")[:3]
            if world == old_world:
                wrong += _differences(expected[rank]["losses"], result["losses"], 0.0, f"{at}: losses")
            bound = 0.0 if world == old_world else BOUND
            wrong += _differences(expected[0]["end"], result["end"], bound, f"{at}: at the end")[:3]
        assert world == 1 or rank == 0 or cut, "a part that begins at a parameter's first element is easily right"
        return wrong

    for wrong in run_world(world, resume, timeout=200):
        assert not wrong, "\n".join(wrong[:10])


class SeveralOptimizers(Everything):
    """Muon and Adafactor at owner ranks, AdamW on slices; manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        vectors = [p for p in self.blocks.parameters() if p.ndim != 2]
        rest = [p for p in self.parameters() if all(p is not q for q in self.blocks.parameters())]
        optimizers = [
            torch.optim.Muon(matrices, lr=0.01),
            torch.optim.Adafactor([{"params": vectors}, {"params": [self.stem.weight]}], lr=0.02),
            torch.optim.AdamW([p for p in rest if p is not self.stem.weight], lr=0.01),
        ]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9) for optimizer in optimizers]
        return optimizers, schedulers


def test_several_optimizers_of_whole_matrices_resume_at_other_worlds(tmp_path: Path) -> None:
    """Momentum and factored statistics live at owner ranks, which are others in each world."""

    def save(rank: int) -> dict[str, Any]:
        with quiet():
            return run(zero(2), SeveralOptimizers(), save=tmp_path / "saved")

    expected = run_world(2, save)
    keys = {name.split(" ", 1)[0] + name.rsplit(" ", 1)[1] for name in expected[0]["at"]["states"]}
    assert {"0momentum_buffer", "1row_var", "1variance", "2exp_avg"} <= keys

    def resume(rank: int, world: int) -> list[str]:
        wrong = []
        for name in ("stage 1", "stage 3"):
            with quiet():
                result = run(zero(STAGES[name]), SeveralOptimizers(seed=5), resume=tmp_path / "saved")
            wrong += _differences(expected[0]["at"], result["at"], 0.0, f"{name}: restored")
            bound = 0.0 if world == 2 else 1e-4
            wrong += _differences(expected[0]["end"], result["end"], bound, f"{name}: at the end")
        return wrong

    for world in (2, 3):
        for wrong in run_world(world, resume, world):
            assert not wrong, f"world {world}: " + "\n".join(wrong[:10])


def test_the_loss_scale_follows_to_another_world_and_stage(tmp_path: Path) -> None:
    def train(rank: int, stage: int, resume: bool) -> dict[str, Any]:
        precision = ZeroPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**8, growth_interval=2))
        where = {"resume": tmp_path / "saved"} if resume else {"save": tmp_path / "saved"}
        scales: dict[str, Any] = {}

        class Scale(pl.Callback):
            def on_train_start(self, *_: Any) -> None:
                scales["start"] = precision.state_dict()

            def on_save_checkpoint(self, *_: Any) -> None:
                scales["saved"] = precision.state_dict()

        with quiet():
            result = run(zero(stage), Everything(), plugins=[precision], callbacks=[Scale()], **where)
        return {**result, **scales, "end scale": precision.state_dict()}

    expected = run_world(2, train, 3, False)[0]
    assert expected["saved"]["scale"] == 2.0**9  # grown once in 3 steps
    for result in run_world(3, train, 1, True):
        assert result["start"] == expected["saved"]
        assert result["end scale"] == expected["end scale"]
        assert not _differences(expected["at"], result["at"], 0.0, "restored")


# ---------------------------------------------------------------------------------------------------------------------
# Models that are not the saved one


class Changed(Everything):
    """``odd`` is called ``strange``, the last block is gone, there is a new layer, ``frozen`` has another shape."""

    def __init__(self, reshape: bool = False) -> None:
        super().__init__(seed=5)
        self.strange = self.odd
        del self.odd
        del self.blocks[1]
        self.new = nn.Linear(WIDTH, WIDTH)
        if reshape:
            self.frozen = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.new(self.blocks[0](self.strange(self.stem(x))))))


@pytest.fixture(scope="module")
def at_two(saved: Any) -> dict[str, Any]:
    """The checkpoint of stage 3 at world 2."""
    return saved[2, "stage 3"][0]


def refusal(path: Path, module: Everything, stage: int) -> str:
    """What resuming ``module`` raised."""
    errors: list[str] = []
    with raised(errors), quiet():
        run(zero(stage), module, resume=path)
    return errors[0] if errors else "nothing"


def what_does_not_fit_is_reported_as_by_torch(reshape: bool, at_two: Any) -> Row:
    """Missing, unexpected and differently shaped, word for word, on every rank."""

    def resume(rank: int) -> list[str]:
        return [refusal(at_two["path"], Changed(reshape), stage) for stage in (1, 3)]

    state = {**at_two["at"]["weights"], "head.weight": at_two["at"]["weights"]["stem.weight"]}
    plain = list(Everything().state_dict())
    with pytest.raises(RuntimeError) as expected:
        Changed(reshape).load_state_dict({name: state[name] for name in plain})
    assert 'Missing key(s) in state_dict: "strange.scale"' in str(expected.value)
    assert ("size mismatch" in str(expected.value)) == reshape
    for found in (yield resume):
        assert found == [f"RuntimeError: {expected.value}"] * 2


class Dropping(Changed):
    """Goes on without the weights, and the optimizer state, of what is gone."""

    strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        own = dict(self.named_parameters())
        for saved in checkpoint["optimizer_states"]:
            for name in [name for name in saved["state"] if name not in own]:
                del saved["state"][name]


class DroppedOnOneRank(Everything):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            del checkpoint["state_dict"]["odd.five"]


class Renamed(Everything):
    """Renames, drops and replaces keys of the weights only, as one does for a file."""

    def __init__(self) -> None:
        super().__init__(seed=5)
        self.strange = self.odd
        del self.odd
        self.strict_loading = True

    def forward(self, x: Tensor) -> Tensor:
        self.odd = self.strange
        try:
            return super().forward(x)
        finally:
            del self.odd

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
        for name in [name for name in weights if name.startswith("odd.")]:
            weights[name.replace("odd.", "strange.")] = weights.pop(name)
        weights["stem.bias"] = torch.arange(float(WIDTH))
        weights["head.bias"] = torch.cat([weights["head.bias"][3:], weights["head.bias"][:3].double() * 2])
        weights["obsolete"] = weights["stem.bias"]
        del weights["obsolete"]


class OneName(Everything):
    """A checkpoint that knows the tied weight by its second name only, as safetensors files and others' may."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["state_dict"].pop("stem.weight")
        optimizer = checkpoint["optimizer_states"][0]
        optimizer["state"]["head.weight"] = optimizer["state"].pop("stem.weight")
        for group in optimizer["param_groups"]:
            group["params"] = ["head.weight" if name == "stem.weight" else name for name in group["params"]]


class Regrouped(Everything):
    """The same model with other param groups."""

    def __init__(self, groups: str) -> None:
        super().__init__(seed=5)
        self.kind = groups

    def groups(self) -> list[dict[str, Any]]:
        matrices, vectors = super().groups()
        if self.kind == "reordered":
            return [
                {**vectors, "lr": 0.5, "params": vectors["params"][::-1]},
                {**matrices, "params": matrices["params"][::-1]},
            ]
        if self.kind == "split":
            half = len(matrices["params"]) // 2
            return [{"params": matrices["params"][:half]}, {"params": matrices["params"][half:]}, vectors]
        if self.kind == "joined":
            return [{"params": matrices["params"] + vectors["params"]}]
        return [matrices, {**vectors, "params": [p for p in vectors["params"] if p is not self.stem.bias]}]


class Thawed(Everything):
    """``frozen`` is frozen, and in no param group, only in the first run."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(seed=1 if frozen else 5)
        self.frozen.requires_grad_(not frozen)

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]


def a_thawed_parameter_starts_with_fresh_state(path: Path) -> Row:
    def train(rank: int) -> dict[str, Any]:
        with quiet():
            before = run(zero(3), Thawed(True), save=path)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                after = run(zero(1), Thawed(False), resume=path)
        texts = [str(w.message) for w in caught if "fresh" in str(w.message)]
        return {"before": before, "after": after, "texts": texts}

    for rank, result in enumerate((yield train)):
        before, after = result["before"], result["after"]
        assert not _differences(before["at"]["states"], after["at"]["states"], 0.0, "states")
        assert torch.equal(after["at"]["weights"]["frozen.weight"], before["at"]["weights"]["frozen.weight"])
        assert not torch.equal(after["end"]["frozen.weight"], before["end"]["frozen.weight"])
        assert len(result["texts"]) == (rank == 0)


class Particular(nn.Module):
    """Loads in a way of its own, as layers with a history and metrics do."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("kept", torch.zeros(3))
        self.extra = 0
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}legacy" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}legacy")

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        assert metadata["version"] == 2
        self.kept = state[f"{prefix}kept"]
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        self.extra += 1
        return x * self.weight


class WithParticular(Everything):
    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.particular = Particular()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.particular(x))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
        weights["particular.legacy"] = weights.pop("particular.weight")


class ByHand(Everything):
    """Copies into parameters itself, a smaller value too."""

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(state, *args, **kwargs)
        self.stem.weight.data.copy_(torch.arange(float(WIDTH)))
        with torch.no_grad():
            self.stem.bias.copy_(torch.tensor(7.0))
            self.head.bias.detach().copy_(2 * state["head.bias"])
        return result


class Assigning(Everything):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=strict, assign=True)


class Filtered(Everything):
    """Saves and loads its blocks only, by overriding ``state_dict``."""

    strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "blocks" in name}


class Wrapped(Everything):
    """Blocks that are compiled or recomputed, which puts a module around each of them."""

    def __init__(self, kind: str, seed: int = 1) -> None:
        super().__init__(seed=seed)
        for index, block in enumerate(self.blocks):
            if kind == "compiled":
                self.blocks[index] = torch.compile(block, backend="eager")
            elif kind == "recomputed":
                self.blocks[index] = checkpoint_wrapper(block)


# ---------------------------------------------------------------------------------------------------------------------
# All of them in one world


def resumed(module: Callable[[], Everything], path: Path, *stages: int) -> Callable[[int], list[dict[str, Any]]]:
    """What a rank does to resume from ``path`` in each stage."""

    def act(rank: int) -> list[dict[str, Any]]:
        with quiet():
            return [run(zero(stage), module(), resume=path) for stage in stages]

    return act


def a_changed_model_takes_what_is_there_when_loading_is_not_strict(at_two: Any) -> Row:
    """Weights and optimizer state by name; new and renamed parameters keep their values and start with fresh state.

    State that nobody takes is an error all the same, unless the module says that it is to go.
    """

    def resume(rank: int) -> dict[str, Any]:
        module = Changed()
        module.strict_loading = False
        assert "state that does not fit AdamW: 'odd.five' (not in the" in refusal(at_two["path"], module, 3)
        module = Dropping()
        with quiet(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            result = run(zero(3), module, resume=at_two["path"])
        return {**result, "warnings": [str(w.message) for w in caught if "does not fit" in str(w.message)]}

    fresh = dict(Changed().named_parameters())
    known = at_two["at"]["weights"]
    for rank, result in enumerate((yield resume)):
        for name, value in result["at"]["weights"].items():
            assert torch.equal(value, known.get(name, fresh.get(name))), name
        states = {k: v for k, v in at_two["at"]["states"].items() if k.split()[1] in result["at"]["weights"]}
        assert not _differences(states, result["at"]["states"], 0.0, "states")
        assert any(not torch.equal(result["end"][name], fresh[name]) for name in ("new.weight", "strange.scale"))
        assert len(result["warnings"]) == (rank == 0)
        assert all("6 parameters that it does not know start fresh ('strange.five'" in t for t in result["warnings"])


def a_key_that_one_rank_drops_is_an_error_on_all(at_two: Any) -> Row:
    """Nobody is left waiting for the rank that raised."""
    first, second = yield lambda rank: refusal(at_two["path"], DroppedOnOneRank(), 3)
    assert "failed on rank 1.\n  rank 1: RuntimeError on host" in first
    assert second.startswith("RuntimeError: Error(s) in loading state_dict for DroppedOnOneRank:")
    for text in (first, second):
        assert 'Missing key(s) in state_dict: "odd.five".' in text


def on_load_checkpoint_renames_drops_and_replaces_keys(at_two: Any) -> Row:
    """The optimizer's state follows the weight it belongs to."""

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("odd.", "strange."): value for name, value in values.items()}

    weights = renamed(at_two["at"]["weights"])
    bias = weights["head.bias"]
    weights |= {"stem.bias": torch.arange(float(WIDTH)), "head.bias": torch.cat([bias[3:], bias[:3] * 2])}
    for results in (yield resumed(Renamed, at_two["path"], 1, 3)):
        for result in results:
            assert not _differences(weights, dict(result["at"]["weights"]), 0.0, "weights")
            assert not _differences(renamed(at_two["at"]["states"]), result["at"]["states"], 0.0, "states")


def one_name_of_a_tied_weight_is_enough(at_two: Any) -> Row:
    for (result,) in (yield resumed(lambda: OneName(seed=5), at_two["path"], 3)):
        assert not _differences(at_two["at"], result["at"], 0.0, "restored")


def param_groups_in_another_order_get_their_own_options_and_state(at_two: Any) -> Row:
    rates = [group["lr"] for group in at_two["at"]["options"][0]]
    for (result,) in (yield resumed(lambda: Regrouped("reordered"), at_two["path"], 3)):
        assert not _differences(at_two["at"]["states"], result["at"]["states"], 0.0, "states")
        assert [group["lr"] for group in result["at"]["options"][0]] == rates[::-1]


def refused_on_every_rank(make: Callable[[], Everything], at_two: Any, *messages: str) -> Row:
    """In as many stages as there are messages."""
    for found in (yield lambda rank: [refusal(at_two["path"], make(), 3 - i) for i in range(len(messages))]):
        for message, text in zip(messages, found, strict=True):
            assert re.search(message, text), text


def what_a_module_copies_itself_arrives_in_the_shards(at_two: Any) -> Row:
    expected = dict(at_two["at"]["weights"])
    expected["stem.weight"] = torch.arange(float(WIDTH)).expand_as(expected["stem.weight"])
    expected["stem.bias"] = torch.full_like(expected["stem.bias"], 7.0)
    expected["head.bias"] = 2 * expected["head.bias"]
    for results in (yield resumed(lambda: ByHand(seed=5), at_two["path"], 1, 3)):
        for result in results:
            assert not _differences(expected, result["at"]["weights"], 0.0, "weights")


def a_modules_own_loading_code_runs_on_shards(path: Path) -> Row:
    """Versions, hooks that rename, modules that keep what they are given, extra state."""

    def play(rank: int) -> list[dict[str, Any]]:
        found = []
        for stage, where in ((3, {"save": path}), (1, {"resume": path}), (3, {"resume": path})):
            module = WithParticular(seed=1 + len(found))
            with quiet():
                found.append({**run(zero(stage), module, **where), "extra": module.particular.extra})
        return found

    for saved, *results in (yield play):
        for result in results:
            assert not _differences(saved["at"], result["at"], 0.0, "restored")
            assert not _differences(saved["losses"], result["losses"], 0.0, "losses")
            assert result["extra"] == saved["extra"] == result["end"]["particular.kept"][0] == 6


def an_overridden_state_dict_decides_what_is_saved_and_loaded(path: Path) -> Row:
    def play(rank: int) -> list[dict[str, Any]]:
        with quiet():
            saved = run(zero(3), Filtered(), save=path)
            return [saved, *(run(zero(stage), Filtered(seed=5), resume=path) for stage in (1, 3))]

    fresh = dict(Everything(seed=5).named_parameters())
    for saved, *results in (yield play):
        for result in results:
            for name, value in result["at"]["weights"].items():
                if name != "seen":
                    expected = saved["at"]["weights"][name] if "blocks" in name else fresh[name]
                    assert torch.equal(value, expected), name
            assert not _differences(saved["at"]["states"], result["at"]["states"], 0.0, "states")
    assert all("blocks" in name for name in open_checkpoint(path, ControlGroup(None))["state_dict"])


def names_do_not_depend_on_what_wraps_a_block(folder: Path) -> Row:
    """Neither those of weights nor those of optimizer states."""

    def train(rank: int) -> list[int]:
        with quiet():
            for kind in ("plain", "compiled", "recomputed"):
                run(zero(3), Wrapped(kind), save=folder / kind)
            pairs = (("plain", "compiled"), ("compiled", "recomputed"), ("recomputed", "plain"))
            results = [run(zero(1), Wrapped(new, seed=5), resume=folder / old) for old, new in pairs]
            return [len(result["at"]["states"]) for result in results]

    for counts in (yield train):
        assert min(counts) > 0
    names = []
    for kind in ("plain", "compiled", "recomputed"):
        found = open_checkpoint(folder / kind, ControlGroup(None))
        names.append([list(found["state_dict"]), list(found["optimizer_states"][0]["state"])])
    assert not [name for name in names[0][0] if "_orig_mod" in name or "_wrapped" in name]
    assert names[0] == names[1] == names[2]


def test_models_and_groups_that_are_not_the_saved_ones(at_two: Any, tmp_path: Path) -> None:
    split = r"ValueError: Param groups 0 and 1 of AdamW are one group, 0, in the checkpoint\. Build"
    joined = r"ValueError: Param group 0 of AdamW has parameters of param groups \[0, 1\] of the checkpoint\."
    shrunk = r"optimizer state that does not fit AdamW: 'stem\.bias' \(not in the optimizer\)\. Build"
    replaced = "^RuntimeError: Loading replaced the parameter '"
    in_one_world(
        2,
        *(what_does_not_fit_is_reported_as_by_torch(reshape, at_two) for reshape in (False, True)),
        a_changed_model_takes_what_is_there_when_loading_is_not_strict(at_two),
        a_key_that_one_rank_drops_is_an_error_on_all(at_two),
        on_load_checkpoint_renames_drops_and_replaces_keys(at_two),
        one_name_of_a_tied_weight_is_enough(at_two),
        param_groups_in_another_order_get_their_own_options_and_state(at_two),
        refused_on_every_rank(lambda: Regrouped("split"), at_two, split),
        refused_on_every_rank(lambda: Regrouped("joined"), at_two, joined),
        refused_on_every_rank(lambda: Regrouped("shrunk"), at_two, shrunk),
        refused_on_every_rank(Assigning, at_two, replaced, replaced, replaced),
        what_a_module_copies_itself_arrives_in_the_shards(at_two),
    )


def test_modules_that_save_and_load_in_a_way_of_their_own(tmp_path: Path) -> None:
    in_one_world(
        2,
        a_thawed_parameter_starts_with_fresh_state(tmp_path / "thawed"),
        a_modules_own_loading_code_runs_on_shards(tmp_path / "particular"),
        an_overridden_state_dict_decides_what_is_saved_and_loaded(tmp_path / "filtered"),
        names_do_not_depend_on_what_wraps_a_block(tmp_path),
    )
