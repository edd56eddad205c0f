"""A module from a sharded directory is the one that Lightning builds from the equivalent file; in one process."""

from __future__ import annotations

import enum
import json
import os
import shutil
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core import saving
from lightning.pytorch.core.saving import save_hparams_to_yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_zero import ZeroCLI
from lightning_zero.checkpoint import open_checkpoint, save_checkpoint_directory
from lightning_zero.checkpoint.format import torch_file
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError, MaterialiseError
from lightning_zero.loading import (
    load_from_checkpoint,
    load_full_state_dict,
)
from lightning_zero.session.checkpoints import require_lightning
from lightning_zero.session.state import renamed
from tests.helpers.runs import Net, batches, quiet, values_of, zero
from tests.helpers.samples import control
from tests.helpers.script import run_forked
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

# --------------------------------------------------------------------------------------------------- modules and files


class Colour(enum.Enum):
    RED = 1


class Mlp(pl.LightningModule):
    """With buffers of both kinds, a metric that is saved, and versions of its modules' state."""

    def __init__(self, width: int = 4, colour: Colour = Colour.RED, folder: Path | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.mean = MeanMetric()
        self.mean.persistent(True)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


class Ignoring(Mlp):
    """Takes an argument that is not saved."""

    def __init__(self, inner: Any, width: int = 4) -> None:
        super().__init__(width)
        self.save_hyperparameters(ignore="inner")
        self.inner = inner


class OneArgument(pl.LightningModule):
    """Saves one object with everything in it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.layer = nn.Linear(config["width"], 2)


class Anything(pl.LightningModule):
    """Takes what it is given."""

    def __init__(self, width: int = 4, **rest: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.rest = nn.Linear(width, 2), rest


class Renaming(Mlp):
    """Was saved when the layers were called ``old``."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("layers.", "old."): value for name, value in state.items()}
        checkpoint["note"] = "saved"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("old.", "layers."): value for name, value in state.items()}
        self.note = checkpoint["note"]


class Late(pl.LightningModule):
    """Built in ``configure_model``."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer: nn.Module | None = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(self.hparams["width"], 2)


class Lenient(Mlp):
    @property
    def strict_loading(self) -> bool:
        return False

    @strict_loading.setter
    def strict_loading(self, value: bool) -> None:
        raise NotImplementedError


class Transposed(pl.LightningModule):
    """Its square weight was saved the other way round, which only its own loading knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Versioned(pl.LightningModule):
    """Converts the state of its first release, which had halves of the values."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = 2 * state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


class Tied(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def saved(module: pl.LightningModule, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """One checkpoint as Lightning's file and as our directory.

    Args:
        module: whose values are replaced by random ones.
        folder: where to.
        changes: entries of the checkpoint to replace.
    """
    module.configure_model()
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point() and name != "angles":
                tensor.copy_(torch.rand_like(tensor))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    checkpoint = {**trainer._checkpoint_connector.dump_checkpoint(weights_only=True), **changes}
    torch.save(checkpoint, folder / "file.ckpt")
    save_checkpoint_directory(checkpoint, folder / "directory.ckpt", ControlGroup(None), plan_summary={})
    return folder / "file.ckpt", folder / "directory.ckpt"


@contextmanager
def in_a_store(directory: Path) -> Iterator[str]:
    """The address of a copy of a checkpoint in an object store."""
    url = "memory://loading/run.ckpt"
    store = fsspec.filesystem("memory")
    for file in directory.iterdir():
        store.pipe(f"{url}/{file.name}", file.read_bytes())
    try:
        yield url
    finally:
        store.rm("/loading", recursive=True)


def seen(load: Callable[[], Any]) -> dict[str, Any]:
    """What a load came to: everything about the module, or the kind of error; and what was warned about."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        try:
            module = load()
        except (TypeError, ValueError, RuntimeError) as error:
            return {"error": type(error)}
    found: dict[str, Any] = {
        "type": type(module),
        "hparams": dict(module.hparams),
        "hparams type": type(module.hparams),
        "attributes": {key: vars(module).get(key) for key in ("inner", "rest", "note", "rows")},
        "warned": [str(warning.message).split(":")[0] for warning in noted if warning.category is UserWarning],
    }
    if isinstance(module, nn.Module):
        found["tensors"] = {name: (value, value.requires_grad) for name, value in module.named_parameters()}
        found["tensors"] |= {name: (value, False) for name, value in module.named_buffers()}
        found["state"] = {name: (value, False) for name, value in module.state_dict().items()}
        found["device"] = module.device
        found["training"] = module.training
    return found


def assert_alike(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    for kind in ("tensors", "state"):
        left, right = expected.pop(kind, {}), actual.pop(kind, {})
        assert list(left) == list(right)
        for name in left:
            assert torch.equal(left[name][0], right[name][0]), name
            assert left[name][1] == right[name][1], name
            assert type(left[name][0]) is type(right[name][0]), name
    assert expected == actual


# ------------------------------------------------------------------------------------------ as Lightning's own loading

CASES: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "saved arguments": (lambda: Mlp(6, folder=Path("a/b")), Mlp, {}),
    "an argument on top": (lambda: Mlp(6), Mlp, {"folder": Path("c"), "strict": True}),
    "an argument that makes the shapes wrong": (lambda: Mlp(6), Mlp, {"width": 7}),
    "an argument that was not saved": (lambda: Ignoring("x", 6), Ignoring, {"inner": "y"}),
    "a missing argument": (lambda: Ignoring("x", 6), Ignoring, {}),
    "another class with fewer arguments": (lambda: Mlp(6), Late, {"strict": False}),
    "one dictionary": (lambda: OneArgument({"width": 5, "deep": {"a": (1, 2)}}), OneArgument, {}),
    "one dictionary, another one given": (lambda: OneArgument({"width": 5}), OneArgument, {"config": {"width": 5}}),
    "any arguments": (lambda: Anything(5, a=1, b=[2.5, None]), Anything, {"b": 3, "c": 4}),
    "renamed in on_load_checkpoint": (lambda: Renaming(6), Renaming, {}),
    "built in configure_model": (lambda: Late(7), Late, {}),
    "missing and unexpected": (lambda: Late(7), Mlp, {}),
    "missing and unexpected, not strict": (lambda: Late(7), Mlp, {"strict": False}),
    "a module that is not strict": (lambda: Late(7), Lenient, {}),
    "its own loading": (Transposed, Transposed, {}),
    "its own loading, by version": (Versioned, Versioned, {}),
    "tied": (Tied, Tied, {}),
    "on a device": (lambda: Mlp(6), Mlp, {"map_location": torch.device("cpu")}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_from_a_directory_is_the_one_lightning_builds_from_a_file(case: str, tmp_path: Path) -> None:
    build, load_as, arguments = CASES[case]
    file, directory = saved(build(), tmp_path)

    expected = seen(lambda: load_as.load_from_checkpoint(file, weights_only=False, **arguments))

    assert_alike(dict(expected), seen(lambda: load_from_checkpoint(load_as, directory, **arguments)))
    assert_alike(dict(expected), seen(lambda: load_from_checkpoint(load_as, file, weights_only=False, **arguments)))
    assert_alike(dict(expected), seen(lambda: load_as.load_from_checkpoint(directory, **arguments)))
    assert ("error" in expected) == (case in ERRORS), expected


ERRORS = {"an argument that makes the shapes wrong", "a missing argument", "missing and unexpected"}


@pytest.mark.parametrize("suffix", [".yaml", ".csv", ".json"])
def test_hyper_parameters_from_a_file_replace_the_saved_ones(suffix: str, tmp_path: Path) -> None:
    file, directory = saved(Anything(6, a=1), tmp_path)
    hparams = tmp_path / f"hparams{suffix}"
    if suffix == ".yaml":
        save_hparams_to_yaml(hparams, Namespace(width=6, b=2))
    else:
        hparams.write_text("key,value\nwidth,6\nb,2\n")

    expected = seen(lambda: Anything.load_from_checkpoint(file, hparams_file=str(hparams), c=3))

    assert_alike(dict(expected), seen(lambda: load_from_checkpoint(Anything, directory, hparams_file=hparams, c=3)))
    assert_alike(expected, seen(lambda: Anything.load_from_checkpoint(directory, hparams_file=hparams, c=3)))
    if suffix != ".json":
        assert load_from_checkpoint(Anything, directory, hparams_file=hparams).rest == {"b": 2}


@pytest.mark.parametrize(
    ("instantiator", "class_path"),
    [
        ("lightning.pytorch.cli.instantiate_module", None),
        ("lightning.pytorch.cli.instantiate_module", f"{__name__}.Anything"),
        ("lightning.pytorch.cli.instantiate_module", "antigravity.Anything"),
        ("os.system", None),
        (7, None),
    ],
)
def test_what_a_checkpoint_may_have_its_module_built_by(
    instantiator: Any, class_path: str | None, tmp_path: Path
) -> None:
    hparams = {"width": 6, "_instantiator": instantiator} | ({"_class_path": class_path} if class_path else {})
    file, directory = saved(Anything(6), tmp_path, hyper_parameters=hparams)

    expected = seen(lambda: Anything.load_from_checkpoint(file))

    assert_alike(dict(expected), seen(lambda: load_from_checkpoint(Anything, directory)))
    refused = instantiator in ("os.system", 7) or class_path == "antigravity.Anything"
    assert expected.get("error") is (ValueError if refused else None)


def test_a_class_is_not_imported_where_lightning_does_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its earlier releases."""
    monkeypatch.setattr(saving, "_is_imported_subclass", lambda *_: True, raising=False)
    built_by = {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": "antigravity.Anything"}
    _, directory = saved(Anything(6), tmp_path, hyper_parameters={"width": 6, **built_by})
    with pytest.raises(ValueError, match=r"'antigravity\.Anything', which is not an imported subclass of Anything"):
        load_from_checkpoint(Anything, directory)
    assert "antigravity" not in sys.modules


def test_strictness_that_contradicts_the_module(tmp_path: Path) -> None:
    class Chosen(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False

    file, directory = saved(Mlp(), tmp_path)

    with pytest.raises(ValueError, match="conflict"):
        Chosen.load_from_checkpoint(file, strict=True, weights_only=False)
    with pytest.raises(ValueError, match=r"Chosen\.strict_loading=False"):
        load_from_checkpoint(Chosen, directory, strict=True)


def test_a_data_module(tmp_path: Path) -> None:
    class Rows(pl.LightningDataModule):
        def __init__(self, rows: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.rows = rows

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.rows += state_dict["position"]

    changes = {
        Rows.CHECKPOINT_HYPER_PARAMS_KEY: {"rows": 5},
        Rows.CHECKPOINT_HYPER_PARAMS_NAME: "kwargs",
        Rows.__qualname__: {"position": 20},
    }
    file, directory = saved(Mlp(), tmp_path, **changes)

    assert load_from_checkpoint(Rows, directory).rows == 25
    assert Rows.load_from_checkpoint(str(directory), rows=7).rows == 27
    assert load_from_checkpoint(Rows, directory, rows=6).rows == 26
    assert seen(lambda: load_from_checkpoint(Rows, directory)) == seen(
        lambda: Rows.load_from_checkpoint(file, weights_only=False)
    )


class Named(pl.LightningModule):
    """Its arguments have the names of ours."""

    def __init__(self, path: int = 0, verify: int = 0, initial_weights: int = 0) -> None:
        super().__init__()
        self.given = (path, verify, initial_weights)
        self.layer = nn.Linear(2, 2)


def test_arguments_of_the_module_are_not_taken_for_ours(tmp_path: Path) -> None:
    file, directory = saved(Named(), tmp_path)
    for path in (file, directory):
        assert Named.load_from_checkpoint(path, path=1, verify=2, initial_weights=3).given == (1, 2, 3)


def test_files_go_lightnings_way_and_directories_that_are_no_checkpoint_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, directory = saved(Mlp(), tmp_path)
    opened: list[Any] = []
    monkeypatch.setattr(
        saving, "pl_load", lambda path, **_: opened.append(path) or torch.load(path, weights_only=False)
    )

    Mlp.load_from_checkpoint(file)
    Mlp.load_from_checkpoint(directory)
    with file.open("rb") as stream:
        Mlp.load_from_checkpoint(stream)
    with pytest.raises(IsADirectoryError):
        Mlp.load_from_checkpoint(tmp_path)

    assert opened == [file, stream, tmp_path]


@pytest.mark.parametrize(
    ("given", "error"), [({"cuda:0": "cpu"}, TypeError), (lambda storage, _: storage, TypeError), ("meta", ValueError)]
)
def test_a_map_that_is_not_one_device(given: Any, error: type[Exception], tmp_path: Path) -> None:
    for path in saved(Mlp(), tmp_path):
        with pytest.raises(error, match="map_location"):
            load_from_checkpoint(Mlp, path, map_location=given)


class Assigning(Mlp):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=strict, assign=True)


def test_a_module_that_takes_over_what_it_is_given_is_an_ordinary_one(tmp_path: Path) -> None:
    original = Assigning()
    _, directory = saved(original, tmp_path)

    module = load_from_checkpoint(Assigning, directory)

    for name, value in module.state_dict(keep_vars=True).items():
        assert type(value) in (Tensor, nn.Parameter, nn.Buffer), name
        assert torch.equal(value, original.state_dict()[name]), name
    module.layers[0].weight.data.zero_()
    assert module.layers[0].weight.requires_grad


@pytest.mark.parametrize("name", ["file.ckpt", "file.pt", "file.safetensors", "folder/model.safetensors"])
def test_ranks_that_see_different_weights_of_the_same_shapes(name: str, tmp_path: Path) -> None:
    """As on disks of their own, of which one has an older copy."""

    def look(rank: int) -> str:
        path = tmp_path / str(rank) / name
        path.parent.mkdir(parents=True)
        state = {"w": torch.full((300, 300), float(rank))}
        if path.suffix == ".safetensors":
            save_file(state, path)
        else:
            torch.save(state, path, _use_new_zipfile_serialization=path.suffix == ".ckpt")
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path if "/" not in name else path.parent, control())
        return str(caught.value)

    assert all("rank 1 sees another checkpoint there than rank 0" in text for text in run_world(2, look))


def test_a_file_that_is_cut_off_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its elements are read when they are used, which would then end the process."""
    path = tmp_path / "file.ckpt"
    torch.save({"w": torch.ones(10_000)}, path)
    load = torch_file.load_torch

    def cut(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        os.truncate(path, 1000)
        return loaded

    monkeypatch.setattr(torch_file, "load_torch", cut)
    with pytest.raises(CheckpointError, match="was changed while it was opened"):
        load_full_state_dict(path)


def test_a_run_goes_on_from_checkpoints_of_a_trainer_only(tmp_path: Path) -> None:
    require_lightning({"pytorch-lightning_version": "2.6.0"}, "a.ckpt")
    with pytest.raises(CheckpointError, match=r"'a\.safetensors'.*CheckpointPolicy\(initial_weights="):
        require_lightning({"state_dict": {}}, "a.safetensors")


@pytest.mark.parametrize("dtype", [int, torch.int8, "bfloat16"])
def test_weights_are_cast_to_floating_point_only(dtype: Any, tmp_path: Path) -> None:
    _, directory = saved(Mlp(), tmp_path)
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype"):
        load_full_state_dict(directory, dtype=dtype)


# ------------------------------------------------------------------------------------------------ from real runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two ranks in stage 3, and the run's full values."""
    folder = tmp_path_factory.mktemp("run")

    def train(rank: int) -> Any:
        with quiet():
            module = Net()
            trainer = make_trainer(zero(3), max_epochs=1)
            trainer.fit(module, batches(2))
            trainer.save_checkpoint(folder / "run.ckpt")
        return values_of(module)

    return folder / "run.ckpt", run_world(2, train)[0]


def test_the_full_values_of_a_sharded_run(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, values = run

    module = load_from_checkpoint(Net, path, seed=9)

    state = module.state_dict()
    assert list(state) == [name for name in values if name in state]
    for name, value in values.items():
        assert torch.equal(state[name], value), name
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert not torch.distributed.is_initialized()


def test_the_full_state_dict_of_a_sharded_run(run: tuple[Path, dict[str, Tensor]]) -> None:
    path, values = run

    whole = load_full_state_dict(path)
    inner = load_full_state_dict(path, prefix="model.", dtype=torch.bfloat16, verify=True)

    assert whole.keys() == values.keys() >= {f"model.{name}" for name in inner}
    for name, value in whole.items():
        assert torch.equal(value, values[name]), name
        assert type(value) is Tensor
    for name, value in inner.items():
        expected = values[f"model.{name}"]
        assert torch.equal(value, expected.bfloat16() if expected.is_floating_point() else expected), name


def test_a_directory_in_an_object_store(tmp_path: Path) -> None:
    module = Mlp(6)
    _, directory = saved(module, tmp_path)
    with in_a_store(directory) as url:
        loaded = load_from_checkpoint(Mlp, url, verify=True)
        by_lightning = Mlp.load_from_checkpoint(url)

    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert torch.equal(by_lightning.state_dict()[name], value), name


def test_a_prefix_that_nothing_has_is_named(run: tuple[Path, dict[str, Tensor]]) -> None:
    with pytest.raises(CheckpointError, match=r"begins with 'encoder\.': it holds model\."):
        load_full_state_dict(run[0], prefix="encoder.")


def test_a_checkpoint_without_weights_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": 3, "epoch": 1}, tmp_path / "strange.ckpt")

    with pytest.raises(CheckpointError, match=r"strange\.ckpt"):
        load_from_checkpoint(Mlp, tmp_path / "strange.ckpt")


# ------------------------------------------------------------------------------------------------------- on meta


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(4, 3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.outer(torch.arange(4.0), torch.arange(3.0)).cos())


class OnMeta(pl.LightningModule):
    """Takes no memory until its weights come."""

    def __init__(self, fresh: bool = False, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.fresh, self.net = fresh, None
        if buffer is not None:
            self.register_buffer("early", buffer)

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with torch.device("meta"):
            self.net = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3, bias=False), "r": Rotary()})
            self.net["tied"] = nn.Linear(4, 3)
            self.net["tied"].weight = self.net["b"].weight
            if self.fresh:
                self.net["fresh"] = nn.Linear(3, 3)
        self.net["a"].weight.requires_grad_(False)
        self.net["a"].weight.note = "mine"


class OnCpu(OnMeta):
    def configure_model(self) -> None:
        self.net = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3, bias=False), "r": Rotary()})
        self.net["tied"] = nn.Linear(4, 3)
        self.net["tied"].weight = self.net["b"].weight


def test_a_module_on_meta_gets_its_memory_from_the_checkpoint(tmp_path: Path) -> None:
    _, directory = saved(OnCpu(), tmp_path)

    module = OnMeta.load_from_checkpoint(directory)

    expected = load_full_state_dict(directory)
    assert {name: value.device.type for name, value in module.state_dict().items()} == dict.fromkeys(expected, "cpu")
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert module.net["tied"].weight is module.net["b"].weight
    assert torch.equal(module.net["r"].angles, Rotary().angles)  # not in the checkpoint: as it was computed
    assert not module.net["a"].weight.requires_grad
    assert module.net["a"].weight.note == "mine"
    assert module.net["a"].bias.requires_grad


def test_what_a_checkpoint_lacks_is_initialised_by_its_module(tmp_path: Path) -> None:
    _, directory = saved(OnCpu(), tmp_path)

    with pytest.warns(UserWarning, match=r"but not in the checkpoint: \['net\.fresh\.weight', 'net\.fresh\.bias'\]"):
        module = load_from_checkpoint(OnMeta, directory, fresh=True, strict=False)

    assert not module.net["fresh"].weight.is_meta
    assert 0 < module.net["fresh"].weight.abs().max() <= 1 / 3**0.5  # nn.Linear: uniform up to 1 / sqrt(inputs)


def test_a_meta_tensor_without_any_value_is_named(tmp_path: Path) -> None:
    _, directory = saved(OnCpu(), tmp_path)

    with pytest.raises(MaterialiseError, match="'early'"):
        load_from_checkpoint(OnMeta, directory, buffer=torch.empty(2, device="meta"), strict=False)


# ------------------------------------------------------------------------------------------------- frozen and tied


class Adapted(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"inner": nn.Linear(3, 3)})
        self.adapter = nn.Linear(3, 3)
        self.base.requires_grad_(False)


def adapters_and_base(folder: Path) -> tuple[Path, Path, Adapted]:
    """A checkpoint of adapters, one of the base alone, and the module with the values of both."""
    (folder / "whole").mkdir()
    module = Adapted()
    saved(module, folder / "whole")
    state = module.state_dict()
    frozen = ["base.inner.weight", "base.inner.bias"]
    adapters = {"state_dict": {name: state[name] for name in state if name not in frozen}}
    adapters["lightning_zero"] = {"excluded_frozen": frozen}
    control = ControlGroup(None)
    save_checkpoint_directory(adapters, folder / "adapters.ckpt", control, plan_summary={})
    base = {"state_dict": {name.removeprefix("base."): state[name] for name in frozen}}
    save_checkpoint_directory(base, folder / "base.ckpt", control, plan_summary={})
    return folder / "adapters.ckpt", folder / "base.ckpt", module


def test_frozen_parameters_that_were_left_out_are_counted_and_not_missing(tmp_path: Path) -> None:
    adapters, _, expected = adapters_and_base(tmp_path)

    with pytest.warns(
        UserWarning, match=r"without its frozen parameters: 2 of them.*base\.inner\.weight.*initial_weights"
    ):
        module = load_from_checkpoint(Adapted, adapters)

    assert torch.equal(module.adapter.weight, expected.adapter.weight)
    assert not torch.equal(module.base["inner"].weight, expected.base["inner"].weight)
    with pytest.warns(UserWarning, match="2 of them are not in the result"):
        assert set(load_full_state_dict(adapters)) == {"adapter.weight", "adapter.bias"}


def test_what_else_is_missing_is_still_an_error(tmp_path: Path) -> None:
    adapters, _, _ = adapters_and_base(tmp_path)

    class More(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(RuntimeError, match=r"Missing key\(s\)[^.]*\"more\.weight\", \"more\.bias\"\. *$"):
        load_from_checkpoint(More, adapters)


def test_adapters_on_the_base_they_were_trained_on(tmp_path: Path) -> None:
    """The base is found under other names, ``inner.weight`` for ``base.inner.weight``; no warning is left."""
    adapters, base, expected = adapters_and_base(tmp_path)

    module = load_from_checkpoint(Adapted, adapters, initial_weights=base)

    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_initial_weights_without_a_frozen_parameter_are_refused(tmp_path: Path) -> None:
    adapters, _, expected = adapters_and_base(tmp_path)
    state = {"inner.weight": expected.state_dict()["base.inner.weight"]}
    save_file(state, tmp_path / "part.safetensors")

    with pytest.raises(CheckpointError, match=r"part\.safetensors' do not hold base\.inner\.bias: "):
        load_from_checkpoint(Adapted, adapters, initial_weights=tmp_path / "part.safetensors", strict=False)


@pytest.mark.parametrize("compiled", ["stored", "built"])
def test_compiled_blocks_have_the_names_of_their_modules(compiled: str, tmp_path: Path) -> None:
    class Net(pl.LightningModule):
        def __init__(self, compiled: bool = False) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            if compiled:
                self.layer = torch.compile(self.layer, backend="eager")

    module = Net(compiled == "stored")
    _, directory = saved(module, tmp_path)

    loaded = load_from_checkpoint(Net, directory, compiled=compiled == "built")

    for mine, theirs in zip(loaded.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("stored", "own", "strict", "expected"),
    [
        (["h.0.w", "h.1.w"], ["model.h.0.w", "model.h.1.w"], True, ["model.h.0.w", "model.h.1.w"]),
        (["model.h.0.w", "model.h.1.w"], ["h.0.w", "h.1.w", "new"], True, ["h.0.w", "h.1.w"]),
        # One does not fit, but most do: the message about what is missing is to name that one only.
        (["h.0.w", "h.1.w", "x"], ["m.h.0.w", "m.h.1.w"], True, ["m.h.0.w", "m.h.1.w", "x"]),
        (["h.0.w", "h.1.w", "x"], ["m.h.0.w", "m.h.1.w"], False, ["m.h.0.w", "m.h.1.w", "x"]),
        (["h.0.w", "x", "y"], ["m.h.0.w"], False, ["h.0.w", "x", "y"]),
        # One fits as it is.
        (["h.0.w", "n"], ["m.h.0.w", "m.n", "n"], False, ["h.0.w", "n"]),
        # "w" fits in two places, the others in one.
        (["w", "b"], ["m.w", "m.b", "other.w"], True, ["m.w", "m.b"]),
    ],
)
def test_names_under_one_prefix(stored: list[str], own: list[str], strict: bool, expected: list[str]) -> None:
    known = {name: name for name in own}
    found = renamed({name: index for index, name in enumerate(stored)}, [known], "a path", strict)

    assert found == {name: index for index, name in enumerate(expected)}


@pytest.mark.parametrize(
    ("stored", "own", "strict"),
    [
        (["w", "b"], ["student.w", "student.b", "teacher.w", "teacher.b"], True),
        (["w", "b", "c"], ["student.w", "student.b", "student.c", "teacher.w", "teacher.b"], False),
    ],
)
def test_names_under_two_prefixes_are_left_as_they_are(stored: list[str], own: list[str], strict: bool) -> None:
    """Also if more of them are there under one of the two."""
    assert list(renamed(dict.fromkeys(stored), [{name: name for name in own}], "a path", strict)) == stored


# ------------------------------------------------------------------------------------------------------------ memory

MEMORY = """
import json, pathlib
import lightning.pytorch as pl
import torch
from torch import nn
from lightning_zero.loading import load_from_checkpoint

MIB = 2**20

class Large(pl.LightningModule):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(32 * MIB, dtype=dtype) for _ in range(2))

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) // 1024

for dtype in (torch.bfloat16, torch.float32):
    module = None
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    module = load_from_checkpoint(Large, "large.ckpt", dtype=dtype)
    size = sum(weight.nbytes for weight in module.parameters()) // MIB
    value = module.weights[1][-1].item()
    print(json.dumps({"extra": status("VmHWM") - before - size, "size": size, "value": value}))
"""


def test_loading_takes_the_module_and_a_small_constant(tmp_path: Path) -> None:
    """Two tensors of 64 MiB on disk: a copy of one of them would show, also one made to cast it."""
    ones = torch.ones(2**25, dtype=torch.bfloat16)
    weights = {"weights.0": ones, "weights.1": ones.clone()}
    save_checkpoint_directory({"state_dict": weights}, tmp_path / "large.ckpt", ControlGroup(None), plan_summary={})
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)

    lines = run_forked([str(script)], cwd=tmp_path).stdout.splitlines()

    shutil.rmtree(tmp_path / "large.ckpt")  # pytest keeps the folders of the last runs
    for line, size, bound in zip(lines[-2:], (128, 256), (32, 60), strict=True):
        found = json.loads(line)
        assert found["size"] == size
        assert found["value"] == 1.0
        assert found["extra"] < bound, found


# ---------------------------------------------------------------------------------------------------------------------
# LightningCLI, and strategies that read files


class Wider(Anything):
    """Another class than the command line's."""

    def __init__(self, width: int = 4, depth: int = 1) -> None:
        super().__init__(width)
        self.save_hyperparameters()


class Parsed(LightningCLI):
    """Builds what ``--ckpt_path`` asks for, and runs nothing."""

    def fit(self, model: Any, ckpt_path: Any, **_: Any) -> None:
        self.given = ckpt_path

    validate = test = predict = fit


class ParsedByOurs(Parsed, ZeroCLI):
    pass


def parse(command: str, path: Any, cli: type[Parsed] = Parsed, **settings: Any) -> Parsed:
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "strategy": "zero3"}
    model = [f"--model={__name__}.Anything"] if settings.get("subclass_mode_model") else []
    return cli(
        Anything,
        args=[command, f"--ckpt_path={path}", *model],
        trainer_defaults=defaults,
        save_config_callback=None,
        seed_everything_default=False,
        auto_configure_optimizers=False,
        **settings,
    )


def parsed_options(cli: Parsed) -> dict[str, Any]:
    """All that was parsed, without the path."""
    options: dict[str, Any] = cli.config[cli.subcommand].as_dict()
    return {**options, "ckpt_path": None}


@pytest.fixture
def _bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script"])


HPARAMS = {"width": 7, "_instantiator": "lightning.pytorch.cli.instantiate_module"}


@pytest.mark.usefixtures("_bare_command_line")
@pytest.mark.parametrize(
    ("command", "cli", "subclass"),
    [
        ("fit", Parsed, False),
        ("validate", ParsedByOurs, True),
        ("test", Parsed, True),
        ("predict", ParsedByOurs, False),
    ],
)
def test_a_command_line_takes_the_hyperparameters_of_a_directory_as_of_a_file(
    command: str, cli: type[Parsed], subclass: bool, tmp_path: Path
) -> None:
    of_class = {"_class_path": f"{__name__}.Wider", "depth": 3} if subclass else {}
    file, directory = saved(Anything(7), tmp_path, hyper_parameters=HPARAMS | of_class)

    expected, found = (parse(command, path, cli, subclass_mode_model=subclass) for path in (file, directory))

    assert type(found.model) is (Wider if subclass else Anything)
    assert found.model.layer.in_features == 7
    assert dict(found.model.hparams) == dict(expected.model.hparams)
    assert parsed_options(found) == parsed_options(expected)
    assert found.given == found.config[command].ckpt_path == str(directory)


@pytest.mark.usefixtures("_bare_command_line")
def test_a_hyperparameter_that_was_not_kept_is_named(tmp_path: Path) -> None:
    _, directory = saved(Anything(7), tmp_path, hyper_parameters={"width": 7, "activation": nn.ReLU})
    with pytest.raises(CheckpointError, match=r"'hyper_parameters\.activation' .*add_safe_globals"):
        parse("validate", directory)


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_a_strategy_that_reads_files_says_what_makes_one(strategy: str, tmp_path: Path) -> None:
    _, directory = saved(Anything(), tmp_path)
    told = rf"'{directory}' is a sharded checkpoint.*`lightning-zero consolidate {directory} consolidated\.ckpt`"
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)

    with pytest.raises(CheckpointError, match=told):
        trainer.strategy.load_checkpoint(directory)
    with pytest.raises(CheckpointError, match=told):
        Fabric(accelerator="cpu", devices=1, strategy=strategy).load(directory)
    with in_a_store(directory) as url, pytest.raises(CheckpointError, match=f"'{url}' is a sharded checkpoint"):
        trainer.strategy.load_checkpoint(url)
    with pytest.raises(IsADirectoryError):
        trainer.strategy.load_checkpoint(tmp_path)


def test_a_damaged_file_is_named_and_not_called_a_wrong_shape(tmp_path: Path) -> None:
    _, directory = saved(Mlp(), tmp_path)
    (data,) = directory.glob("*.distcp")
    content = bytearray(data.read_bytes())
    weight = load_full_state_dict(directory)["layers.0.weight"]
    place = bytes(content).index(weight.numpy().tobytes())
    content[place] ^= 1
    data.write_bytes(content)

    with pytest.raises(CheckpointError, match=rf"{data.name}' is damaged.*layers\.0\.weight") as caught:
        load_from_checkpoint(Mlp, directory, verify=True)
    assert "size mismatch" not in str(caught.value)


def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    """As safetensors files hold it."""
    weight = torch.rand(5, 3)
    save_file({"embedding.weight": weight}, tmp_path / "model.safetensors")

    module = load_from_checkpoint(Tied, tmp_path / "model.safetensors")

    assert torch.equal(module.head.weight, weight)
    assert module.head.weight is module.embedding.weight


def test_compiled_blocks_that_were_left_out(tmp_path: Path) -> None:
    class Frozen(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2)

    left_out = {"excluded_frozen": ["layer.weight", "layer.bias"]}
    state = {f"head.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    checkpoint = {"state_dict": state, "lightning_zero": left_out}
    save_checkpoint_directory(checkpoint, tmp_path / "head.ckpt", ControlGroup(None), plan_summary={})

    with pytest.warns(UserWarning, match="2 of them keep the values"):
        load_from_checkpoint(Frozen, tmp_path / "head.ckpt")
