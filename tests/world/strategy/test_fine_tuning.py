"""Runs that begin with the weights of another: from every kind of checkpoint, with a new head, with a frozen base."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_zero import CheckpointPolicy, ZeroStrategy
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError
from lightning_zero.loading import load_from_checkpoint
from lightning_zero.session.state import ModuleState, load_initial_weights
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import STAGES, Net, assert_same, batches, made, quiet, raised, values_of, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Base(NamedTuple):
    """A run to start from: its checkpoint, and its values."""

    path: Path
    values: dict[str, Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("base")

    def train(rank: int) -> dict[str, Tensor]:
        module = Net()
        with quiet():
            trainer = make_trainer(zero(3))
            trainer.fit(module, batches(2))
            trainer.save_checkpoint(folder / "base.ckpt")
        return values_of(module)

    return Base(folder / "base.ckpt", run_world(2, train)[0])


class Beginning(Callback):
    """Keeps the values before the first step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.values = values_of(pl_module)


def policy(path: Path | str, strict: bool = True, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy(initial_weights=str(path), strict_initial_weights=strict, **options)


def fitted(module: Any, stage: int, checkpoint: CheckpointPolicy | None = None, **options: Any) -> dict[str, Any]:
    """What a fit of three batches made, and what it began with. Collective."""
    beginning = Beginning()
    ckpt_path = options.pop("ckpt_path", None)
    with quiet():
        trainer = make_trainer(
            ZeroStrategy(stage, units=["Block"], checkpoint=checkpoint or CheckpointPolicy()),
            callbacks=[beginning],
            **options,
        )
        trainer.fit(module, batches(3), ckpt_path=ckpt_path)
    return {**made(module, trainer), "first": beginning.values, "trainer": trainer}


def without(result: dict[str, Any]) -> dict[str, Any]:
    """What can be sent to another process."""
    return {key: value for key, value in result.items() if key != "trainer"}


# ------------------------------------------------------------------------------------------------------ the same model


def a_run_with_initial_weights_is_one_whose_module_had_them(base: Base) -> Row:
    """Bit for bit: weights, losses, and so a fresh optimizer and step 0."""

    def play(rank: int) -> dict[str, Any]:
        results = {}
        for name, stage in STAGES.items():
            results[name] = without(fitted(Net(seed=5), stage, policy(base.path)))
            module = Net(seed=5)
            module.load_state_dict(base.values)
            results[f"{name} expected"] = without(fitted(module, stage))
        return results

    results = yield play
    for name in STAGES:
        assert_same(results, [name], expected=f"{name} expected")
        for result in results:
            assert result[name]["global_step"] == 3
            for parameter, value in base.values.items():
                assert torch.equal(result[name]["first"][parameter], value), parameter


def write_sources(base: Base, folder: Path) -> dict[str, Path]:
    """The same weights as others write them; in the last two without the name of the attribute they are in."""
    sources = {"a file": folder / "file.ckpt", "bare": folder / "bare.pt", "dcp": folder / "dcp"}
    torch.save({"state_dict": base.values, "optimizer_states": [], "epoch": 4}, sources["a file"])
    torch.save(base.values, sources["bare"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"state_dict": base.values}, checkpoint_id=sources["dcp"], no_dist=True)
    inner = {name.removeprefix("model."): value.contiguous() for name, value in base.values.items()}
    sources["safetensors"] = folder / "weights.safetensors"
    save_file(inner, sources["safetensors"])
    sources["Hugging Face"] = folder / "hub"
    sources["Hugging Face"].mkdir()
    files = {name: f"model-{1 + index % 2:05}-of-00002.safetensors" for index, name in enumerate(inner)}
    for file in set(files.values()):
        save_file({name: inner[name] for name in files if files[name] == file}, sources["Hugging Face"] / file)
    index = {"metadata": {}, "weight_map": files}
    (sources["Hugging Face"] / "model.safetensors.index.json").write_text(json.dumps(index))
    return sources


def every_kind_of_checkpoint_gives_the_weights(base: Base, tmp_path: Path) -> Row:
    sources = write_sources(base, tmp_path)

    def play(rank: int) -> dict[str, dict[str, Tensor]]:
        warnings.filterwarnings("ignore", ".*It cannot be verified")  # those without checksums
        return {
            kind: fitted(Net(seed=5), 3, policy(path, verify=True), max_steps=1)["first"]
            for kind, path in sources.items()
        }

    for results in (yield play):
        assert results.keys() == sources.keys()
        for kind, values in results.items():
            for name, value in base.values.items():
                assert torch.equal(values[name], value), (kind, name)


def a_name_of_a_tied_weight_that_is_not_stored(base: Base, tmp_path: Path) -> Row:
    """As safetensors files hold tied weights. Strict, and without a warning."""

    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.stem.weight

    stored = {name: value for name, value in base.values.items() if name != "model.head.weight"}
    save_file(stored, tmp_path / "tied.safetensors")

    def play(rank: int) -> list[dict[str, Tensor]]:
        path = tmp_path / "tied.safetensors"
        return [
            fitted(Net(Tied, seed=5), 3, policy(path, strict=strict), max_steps=1)["first"] for strict in (True, False)
        ]

    for results in (yield play):
        for values in results:
            for name, value in stored.items():
                assert torch.equal(values[name], value), name


class Wide(nn.Module):
    """4 MiB in ``float32``, half of it in each of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1024, 512, bias=False), nn.Linear(512, 1024, bias=False))


def a_rank_reads_its_own_slices_only(tmp_path: Path) -> Row:
    """From a Hugging Face directory in ``bfloat16``: 2 MiB, of which each of two ranks needs 1."""
    hub = tmp_path / "hub"
    hub.mkdir(parents=True)
    torch.manual_seed(4)
    stored = {name: value.bfloat16() for name, value in Wide().state_dict().items()}
    save_file(stored, hub / "model.safetensors")

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # all that read calls returned, cached or not

    def play(rank: int) -> Any:
        amounts = []
        for stage in STAGES.values():
            module = Net(Wide, seed=5)
            with quiet():
                trainer = make_trainer(ZeroStrategy(stage, units=["Linear"]))
                module.validation_step = lambda batch, batch_idx: None
                trainer.validate(module, batches(1), verbose=False)
            engine = trainer.strategy.engine
            before = bytes_read()
            load_initial_weights(ModuleState(engine, module), hub, engine.control, strict=True, verify=False)
            amounts.append(bytes_read() - before)
            values = values_of(module)
        return amounts, values

    for amounts, values in (yield play):
        for amount in amounts:
            assert 2**20 <= amount < 1.1 * 2**20
        for name, value in stored.items():
            assert torch.equal(values[f"model.{name}"], value.float()), name


def a_module_on_the_meta_device(base: Base) -> Row:
    class Late(Net):
        def __init__(self) -> None:
            super().__init__(nn.Identity)

        def configure_model(self) -> None:
            if isinstance(self.model, nn.Identity):
                with torch.device("meta"):
                    self.model = Stack()

    def play(rank: int) -> dict[str, Tensor]:
        return fitted(Late(), 3, policy(base.path), max_steps=1)["first"]

    (values, _) = yield play
    for name, value in base.values.items():
        assert torch.equal(values[name], value), name


# ---------------------------------------------------------------------------------------------------- another model


class NewHead(Stack):
    """Its head is smaller and its norm is new."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = self.layers[:-1]
        self.stem = nn.Linear(WIDTH, WIDTH + 1)
        self.back = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self.back(self.stem(x)))))


def what_does_not_fit_keeps_its_values_and_is_named_once(base: Base) -> Row:
    def play(rank: int) -> Any:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            values = fitted(Net(NewHead, seed=5), 3, policy(base.path, strict=False), max_steps=1)["first"]
        return [str(warning.message) for warning in noted if "Initial weights" in str(warning.message)], values

    (told, values), (told_elsewhere, _) = yield play

    own = dict(Net(NewHead, seed=5).state_dict())
    for name, value in values.items():
        stored = base.values.get(name)
        expected = stored if stored is not None and stored.shape == value.shape else own[name]
        assert torch.equal(value, expected), name
    assert not told_elsewhere
    (message,) = told
    fits = [name for name in own if name in base.values and base.values[name].shape == own[name].shape]
    gone = [name for name in base.values if name not in own]
    assert f"{len(fits)} of {len(own)} tensors were read" in message
    # 20 in and 20 out became 20 in and 21 out
    assert "2 of another shape were skipped: model.stem.weight (20, 20) instead of (21, 20), model.stem.bias" in message
    assert "4 are not there and keep their initial values: model.norm.weight, model.norm.bias, model.back" in message
    assert f"{len(gone)} are not in the module and were ignored: {gone[0]}" in message
    assert f" and {len(gone) - 4} more" in message


def refused_everywhere(build: Callable[[], nn.Module], checkpoint: CheckpointPolicy, *parts: str) -> Row:
    """The error of each rank begins with the first part, and has all of the others."""

    def play(rank: int) -> list[str]:
        errors: list[str] = []
        with raised(errors):
            fitted(Net(build), 3, checkpoint)
        return errors

    for (error,) in (yield play):
        assert error.startswith(parts[0]), error
        assert all(part in error for part in parts), error


def damaged_file(base: Base, folder: Path) -> tuple[Path, str]:
    """A copy of the checkpoint with one wrong bit, and the name of the file that has it."""
    damaged = shutil.copytree(base.path, folder / "damaged.ckpt")
    start = base.values["model.stem.weight"].numpy().tobytes()[:16]
    (file,) = (file for file in damaged.glob("*.distcp") if start in file.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(start)] ^= 1
    file.write_bytes(content)
    return damaged, file.name


# ------------------------------------------------------------------------------------------------------- a frozen base


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


class Adapted(Stack):
    """The base, frozen, with an adapter behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(super().forward(x))


class FineTuned(Net):
    def __init__(self, seed: int = 5) -> None:
        super().__init__(Adapted, seed=seed)
        self.save_hyperparameters()


ADAPTERS = ["model.adapter.down.weight", "model.adapter.up.weight"]


def adapters_are_saved_alone_and_resumed_on_their_base(stage: int, base: Base, tmp_path: Path) -> Row:
    """The run that was stopped goes on as the one that was not; its base comes from the initial weights again."""
    settings = policy(base.path, strict=False, exclude_frozen=True)

    def expected_warning() -> Any:
        return pytest.warns(UserWarning, match="2 are not there and keep their initial values: model.adapter.down")

    def play(rank: int) -> Any:
        with expected_warning() if rank == 0 else nullcontext():
            whole = fitted(FineTuned(), stage, settings, max_epochs=2)
            stopped = fitted(FineTuned(), stage, settings, max_epochs=1)
            stopped["trainer"].save_checkpoint(tmp_path / "adapters.ckpt")
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            resumed = fitted(FineTuned(seed=6), stage, settings, max_epochs=2, ckpt_path=tmp_path / "adapters.ckpt")
        told = [str(warning.message) for warning in noted]
        return without(whole), without(stopped), without(resumed), told

    for rank, (whole, stopped, resumed, told) in enumerate((yield play)):
        for name, value in base.values.items():
            for result in (whole, stopped, resumed):
                assert torch.equal(result["weights"][name], value), name
        for name in ADAPTERS:
            assert not torch.equal(stopped["weights"][name], stopped["first"][name]), name
            assert torch.equal(resumed["first"][name], stopped["weights"][name]), name
            assert torch.equal(resumed["weights"][name], whole["weights"][name]), name
        assert len(whole["losses"]) == 6
        assert all(map(torch.equal, resumed["losses"], whole["losses"][3:]))
        assert any(f"{len(base.values)} keep the values" in message for message in told) == (rank == 0), told

    checkpoint = open_checkpoint(tmp_path / "adapters.ckpt", ControlGroup(None))
    assert list(checkpoint["state_dict"]) == ADAPTERS
    assert checkpoint["lightning_zero"]["excluded_frozen"] == list(base.values)
    (optimizer,) = checkpoint["optimizer_states"]
    assert list(optimizer["state"]) == ADAPTERS


def initial_weights_do_not_undo_training(base: Base) -> Row:
    """A second fit shards the module anew, because parameters were thawed or the stage is another one."""

    def play(rank: int) -> Any:
        module = Net(seed=5)
        module.model.stem.requires_grad_(False)
        first = fitted(module, 3, policy(base.path), max_epochs=1)
        module.model.stem.requires_grad_(True)
        second = fitted(module, 3, policy(base.path), max_epochs=1)
        third = fitted(module, 2, policy(base.path), max_epochs=1)
        return first["weights"], second["first"], second["weights"], third["first"]

    for trained, thawed, longer, other_stage in (yield play):
        for name, value in trained.items():
            assert torch.equal(thawed[name], value), name
            assert torch.equal(other_stage[name], longer[name]), name


def a_resumed_run_does_not_return_to_the_initial_weights(base: Base, path: Path) -> Row:
    def play(rank: int) -> Any:
        whole = fitted(Net(seed=5), 3, policy(base.path), max_epochs=2)
        stopped = fitted(Net(seed=5), 3, policy(base.path), max_epochs=1)
        stopped["trainer"].save_checkpoint(path)
        resumed = fitted(Net(seed=6), 3, policy(base.path), max_epochs=2, ckpt_path=path)
        return whole["weights"], stopped["weights"], resumed["first"], resumed["weights"]

    for whole, stopped, first, resumed in (yield play):
        for name, value in base.values.items():
            assert torch.equal(first[name], stopped[name]), name
            assert not torch.equal(first[name], value), name
            assert torch.equal(resumed[name], whole[name]), name


def test_begin_with_the_weights_of_another_run(base: Base, tmp_path: Path) -> None:
    in_one_world(
        2,
        a_run_with_initial_weights_is_one_whose_module_had_them(base),
        every_kind_of_checkpoint_gives_the_weights(base, tmp_path),
        a_name_of_a_tied_weight_that_is_not_stored(base, tmp_path),
        a_rank_reads_its_own_slices_only(tmp_path / "own"),
        a_module_on_the_meta_device(base),
        what_does_not_fit_keeps_its_values_and_is_named_once(base),
        *(adapters_are_saved_alone_and_resumed_on_their_base(stage, base, tmp_path / str(stage)) for stage in (1, 3)),
        initial_weights_do_not_undo_training(base),
        a_resumed_run_does_not_return_to_the_initial_weights(base, tmp_path / "stopped.ckpt"),
    )


def test_weights_that_cannot_be_those_of_the_module(base: Base, tmp_path: Path) -> None:
    """Without a single name that fits, a run would begin with random weights, and look as if it had not."""
    other = tmp_path / "other.safetensors"
    save_file({"decoder.weight": torch.zeros(2), "decoder.bias": torch.zeros(1)}, other)
    damaged, file = damaged_file(base, tmp_path)
    misfit = ("size mismatch for model.stem.weight", '"model.norm.weight"', '"model.head.bias"')
    way = "CheckpointPolicy(strict_initial_weights=False)"
    nothing_fits = ("RuntimeError: ", "decoder.weight", "model.stem.weight")
    in_one_world(
        2,
        refused_everywhere(NewHead, policy(base.path), "RuntimeError: The initial weights", way, *misfit),
        *(refused_everywhere(Stack, policy(other, strict=strict), *nothing_fits) for strict in (True, False)),
        refused_everywhere(Stack, policy(tmp_path / "nowhere.ckpt"), "CheckpointError", "nowhere.ckpt"),
        refused_everywhere(Stack, policy(damaged, verify=True), "CheckpointError", f"{file}' is damaged"),
    )


def test_adapters_in_one_process_on_their_base(base: Base, tmp_path: Path) -> None:
    """Without it they are no initial weights, and the message says what was left out."""

    def play(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for form in ("sharded", "consolidated"):
            settings = policy(base.path, strict=False, exclude_frozen=True, format=form)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = fitted(FineTuned(), 3, settings)
            result["trainer"].save_checkpoint(tmp_path / f"{form}.ckpt")
            found.append(result["weights"])
        return found

    for form, values in zip(("sharded", "consolidated"), run_world(2, play)[0], strict=True):
        path = tmp_path / f"{form}.ckpt"
        assert path.is_dir() == (form == "sharded")
        module = load_from_checkpoint(FineTuned, path, initial_weights=base.path, seed=7)
        for name, value in module.state_dict().items():
            assert torch.equal(value, values[name]), name
    adapters = tmp_path / "sharded.ckpt"
    left_out = f"saved without its {len(base.values)} frozen parameters"
    in_one_world(2, refused_everywhere(Adapted, policy(adapters), "RuntimeError", left_out))
    with pytest.raises(CheckpointError, match="nowhere"):
        load_from_checkpoint(FineTuned, adapters, initial_weights=tmp_path / "nowhere.ckpt")
