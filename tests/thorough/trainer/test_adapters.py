"""Runs whose base comes from ``initial_weights`` into a module that peft, torch.compile or checkpointing has wrapped.

The modules here have peft's names, and adapters as peft builds them; thorough/zoo/test_peft.py plays the library.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_zero import CheckpointPolicy, ZeroStrategy, load_from_checkpoint
from lightning_zero.extensions.formats.names import adapter_names
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.runs import STAGES, Net, batches, quiet, raised, values_of
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world


class Norms(nn.Module):
    """DoRA's magnitudes, as peft has them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(self.get_weight_norm(weight.detach(), torch.zeros(()), 1.0))

    def get_weight_norm(self, weight: Tensor, lora_weight: Tensor, scaling: float) -> Tensor:
        return torch.linalg.norm(weight + scaling * lora_weight, dim=1)


class Lora(nn.Module):
    """A layer with an adapter: ``X.weight`` is called ``X.base_layer.weight``."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, layer: nn.Linear, dora: bool = False) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        if dora:
            self.lora_magnitude_vector = nn.ModuleDict({"default": Norms(layer.weight)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return y * self.lora_magnitude_vector["default"].weight if hasattr(self, "lora_magnitude_vector") else y


class Saved(nn.Module):
    """A layer of ``modules_to_save``: the copy trains."""

    adapter_layer_names = ("modules_to_save",)

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer).requires_grad_(True)})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class Wrapped(nn.Module):
    """A base as ``get_peft_model`` gives it, at ``base_model.model``."""

    def __init__(self, base: nn.Module, dora: bool = True) -> None:
        super().__init__()
        base.requires_grad_(False)
        base.stem, base.head = Lora(base.stem, dora), Saved(base.head)
        base.layers[1].inner = Lora(base.layers[1].inner)
        self.base_model = nn.ModuleDict({"model": base})
        config = SimpleNamespace(peft_type="LORA", init_lora_weights=True, use_dora=dora)
        self.peft_config = {"default": config}

    def forward(self, x: Tensor) -> Tensor:
        return self.base_model["model"](x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def base(tied: bool = False) -> Stack:
    stack = Stack(Layer(), Layer(), Layer())
    if tied:
        stack.head.weight = stack.stem.weight
    return stack


def peft(values: dict[str, Tensor] | None = None, tied: bool = False) -> Wrapped:
    stack = base(tied)
    if values is not None:  # as `from_pretrained` before `get_peft_model`
        stack.load_state_dict(values)
    torch.manual_seed(9)
    return Wrapped(stack)


def blocks(values: dict[str, Tensor] | None = None) -> nn.Module:
    """Adapters, and blocks that torch wraps."""
    module = peft(values)
    layers = module.base_model["model"].layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1] = torch.compile(layers[1], backend="eager")
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


BUILDS: dict[str, Callable[..., nn.Module]] = {
    "peft": peft,
    "peft, tied": lambda values=None: peft(values, tied=True),
    "peft with wrapped blocks": blocks,
}


def sources(values: dict[str, Tensor], folder: Path) -> dict[str, Path]:
    """A base as Hugging Face, DDP, Lightning, and torch.compile name its weights."""
    folder.mkdir()
    paths = {"files": folder / "base.safetensors"}
    save_file({name: value.contiguous() for name, value in values.items()}, paths["files"])
    for kind, prefix in (("DDP", "module."), ("Lightning", "net."), ("compiled", "_orig_mod.")):
        paths[kind] = folder / f"{kind}.ckpt"
        torch.save({"state_dict": {prefix + name: value for name, value in values.items()}}, paths[kind])
    return paths


class Tuned(Net):
    def __init__(self, build: Callable[[], nn.Module] = peft, seed: int = 5) -> None:
        super().__init__(nn.Identity, seed=seed)
        del self.model
        self.net = build()
        self.first: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.first = values_of(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def start(module: Tuned, stage: int, path: Path, **settings: Any) -> Any:
    with quiet():
        policy = CheckpointPolicy(initial_weights=str(path), **settings)
        trainer = make_trainer(ZeroStrategy(stage, checkpoint=policy), max_steps=1)
        trainer.fit(module, batches(1))
    return trainer


@pytest.mark.parametrize("build", BUILDS)
def test_a_base_under_other_names_is_the_one_that_was_loaded_before(build: str, tmp_path: Path) -> None:
    """Bit for bit, adapters, copies of ``modules_to_save`` and magnitudes of DoRA included; strict or not."""
    torch.manual_seed(1)
    values = {name: value.detach().clone() for name, value in base(tied="tied" in build).state_dict().items()}
    expected = {f"net.{name}": value.detach().clone() for name, value in BUILDS[build](values).named_parameters()}
    if "tied" in build:
        del values["head.weight"]  # safetensors hold one name of a tied weight
    paths = sources(values, tmp_path / "base")

    def world(rank: int) -> list[str]:
        wrong = []
        warnings.filterwarnings("ignore", "Initial weights")
        for number, (kind, path) in enumerate(paths.items()):
            for stage in STAGES.values() if kind == "files" else (3,):
                module = Tuned(BUILDS[build])
                start(module, stage, path, strict_initial_weights=(stage + number) % 2 == 0)
                wrong += [f"{kind} {stage} {k}" for k, v in expected.items() if not torch.equal(module.first[k], v)]
        return wrong

    assert run_world(2, world, timeout=120) == [[], []]
    assert any("lora_magnitude_vector" in name for name in expected)


def errors_of(path: Path, change: Callable[[Tuned], None], stages: Any = (1, 2, 3), **settings: Any) -> list[str]:
    """What each of two ranks raised in each stage."""

    def world(rank: int) -> list[str]:
        errors: list[str] = []
        warnings.filterwarnings("ignore", "Initial weights")
        for stage in stages:
            module = Tuned()
            change(module)
            with raised(errors):
                start(module, stage, path, **settings)
        return errors

    return [error for errors in run_world(2, world) for error in errors]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    return sources(dict(base().state_dict()), tmp_path / "base")["files"]


def test_a_frozen_parameter_that_is_not_there_is_an_error(files: Path) -> None:
    def more(module: Tuned) -> None:
        module.net.teacher = nn.Linear(2, 2).requires_grad_(False)
        module.net.new = nn.Linear(2, 2)

    errors = errors_of(files, more, strict_initial_weights=False)
    assert len(errors) == 6
    for error in errors:
        assert error.startswith("CheckpointError: 2 frozen parameters are not in the initial weights ")
        assert "random values: net.teacher.weight, net.teacher.bias." in error
        assert "adapters of peft" in error
        assert "CheckpointPolicy(frozen_as_built=True)" in error
    assert not errors_of(files, more, strict_initial_weights=False, frozen_as_built=True)
    strict = errors_of(files, more, stages=(3,))
    assert len(strict) == 2
    assert "adapters of peft" in strict[0]
    assert '"net.teacher.weight"' in strict[0]
    assert "lora_A" not in strict[0]


def test_adapters_that_are_computed_from_the_base_are_refused(files: Path) -> None:
    for settings, named in (
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": False}, "init_lora_weights=False and use_dora=True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"peft_type": "OSF"}, "peft_type=OSF"),
    ):

        def change(module: Tuned, settings: dict[str, Any] = settings) -> None:
            vars(module.net.peft_config["default"]).update(settings)

        errors = errors_of(files, change, stages=(3,), strict_initial_weights=False)
        assert len(errors) == 2
        assert f"with {named} peft computes the adapter from the base" in errors[0]
        assert "from_pretrained" in errors[0]


def test_adapters_in_one_process_on_files_of_the_base(files: Path, tmp_path: Path) -> None:
    def world(rank: int) -> dict[str, Tensor]:
        module = Tuned()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = start(module, 3, files, exclude_frozen=True)
        trainer.save_checkpoint(tmp_path / "adapters.ckpt")
        return values_of(module)

    values = run_world(2, world)[0]
    module = load_from_checkpoint(Tuned, tmp_path / "adapters.ckpt", initial_weights=files, seed=7)
    for name, value in module.named_parameters():
        assert torch.equal(value, values[name]), name


class Part(nn.Module):
    adapter_layer_names = ()


def tree(names: list[str], parts: tuple[str, ...]) -> nn.Module:
    """A module with parameters of these names, in which some modules are layers of peft."""
    root = nn.Module()
    for name in names:
        *path, last = name.split(".")
        module = root
        for end, key in enumerate(path, 1):
            if key not in module._modules:
                module.add_module(key, Part() if ".".join(path[:end]) in parts else nn.Module())
            module = module._modules[key]
        module.register_parameter(last, nn.Parameter(torch.ones(1)))
    return root


def test_what_adapters_add() -> None:
    own = [
        "base_model.model.q.base_layer.weight",
        "base_model.model.q.lora_A.default.weight",
        "base_model.model.experts.base_layer.base_layer.up",
        "base_model.model.experts.base_layer.lora_A.default.weight",
        "base_model.model.head.original_module.weight",
        "base_model.model.head.modules_to_save.default.weight",
        "base_model.model.wte.token_adapter.base_layer.weight",
        "base_model.model.wte.token_adapter.trainable_tokens_delta.default",
        "base_model.model.norm.weight",
        "base_model.vera_A.default",
        "prompt_encoder.default.embedding.weight",
        "value_head.weight",
        "backbone.base_layer.weight",  # another library's, with a part of that name
        "backbone.level.weight",
    ]
    layers = ("q", "experts", "experts.base_layer", "head", "wte", "wte.token_adapter")
    module = tree(own, tuple(f"base_model.model.{name}" for name in layers))
    assert adapter_names(module, own) == [own[at] for at in (1, 3, 5, 7, 9, 10)]
    plain = tree(own, ())
    assert adapter_names(plain, own) == [own[10]]
    assert not adapter_names(module, ["base_model.model.x.weight", "base_model.head.weight", "head.weight"])


def test_a_checkpoint_that_has_lost_its_adapters_is_no_base(tmp_path: Path) -> None:
    """Its names are those of the module, so that what is missing is missing."""
    state = {name: value for name, value in Tuned().state_dict().items() if "lora_" not in name}
    torch.save({"state_dict": state}, tmp_path / "half.ckpt")

    errors = errors_of(tmp_path / "half.ckpt", lambda module: None, stages=(3,))
    assert len(errors) == 2
    assert '"net.base_model.model.stem.lora_A.default.weight"' in errors[0]
