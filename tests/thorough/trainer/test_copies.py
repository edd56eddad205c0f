"""What users make of a module after a fit: copies, pickles, scripts, traces. Whole, or refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_zero import ActivationPolicy, ZeroStrategy, full_parameters
from tests.helpers.cases import WIDTH, Block, Stack
from tests.helpers.runs import Net, assert_same, batches, each_strategy, fit, name_of, quiet, zero
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world, subprocess_env

X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


def _saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _strictly_exported(module: Net) -> Any:
    """Dynamo copies gradients, too."""
    module.zero_grad()
    return torch.export.export(module.model, (X,), strict=True).module()


# What is made, and whether it is a module that can be trained on.
WAYS: dict[str, Callable[[Net], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": _saved,
    "script": lambda module: module.to_torchscript(),
    "trace": lambda module: module.to_torchscript(method="trace", example_inputs=X),
    "trace of a part": lambda module: torch.jit.trace(module.model, X),
    "export": lambda module: torch.export.export(module.model, (X,)).module(),
    "strict export": lambda module: _strictly_exported(module),
    "symbols": lambda module: torch.fx.symbolic_trace(module.model),
}
MODULES = ("deepcopy", "pickle", "save")


def _made(way: str, module: Net) -> tuple[Tensor, int]:
    """What the copy computes, and how many hooks are on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, tracing distrusts what is constant
        other = WAYS[way](module)
    with torch.no_grad():
        computed = other(X)
    hooks = 0
    if way in MODULES:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in other.modules())
        assert all(type(p) is nn.Parameter and not p._post_accumulate_grad_hooks for p in other.parameters())
        other.losses = []
        optimizer = other.configure_optimizers()
        nn.functional.mse_loss(other(X), X).backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(other(X), computed)
    return computed, hooks


def test_whole_where_values_are() -> None:
    """In stages 1 and 2 after a fit, and in all stages where full values are asked for."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = Net()
        fit(strategy, module)
        module.zero_grad()  # torch.export describes gradients, too
        after = {way: _made(way, module) for way in WAYS} if name_of(strategy) in ("stage 1", "stage 2") else {}
        with full_parameters(module):
            inside = {way: _made(way, module) for way in WAYS}
        return {"after": after or inside, "inside": inside}

    results = each_strategy(play)
    assert_same(results)
    assert [results[0]["ddp"]["inside"][way][1] for way in WAYS] == [0] * len(WAYS)


@pytest.mark.parametrize(("stage", "precision"), [(3, "32-true"), (1, "bf16-mixed"), (2, "bf16-mixed")])
def test_refused_where_values_are_not(stage: int, precision: Any) -> None:
    """By name and with what to do; and the run is none the worse for it."""

    def play(rank: int) -> tuple[dict[str, str], bool]:
        module, told = Net(), {}
        with quiet():
            trainer = fit(zero(stage), module, precision=precision)
            for way in (*MODULES, "script", "trace", "export", "strict export"):
                try:
                    told[way] = str(_made(way, module))
                except Exception as error:
                    told[way] = f"{type(error).__name__}: {error}"
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, batches(4))
            with full_parameters(module):
                finite = all(bool(parameter.isfinite().all()) for parameter in module.parameters())
        return told, finite

    for told, finite in run_world(2, play, timeout=100):
        for way, message in told.items():
            if way in (*MODULES, "script", "trace"):
                assert message.startswith("ParameterAccessError: A "), (way, message)
                assert "of Net" in message, (way, message)
            assert "`with lightning_zero.full_parameters(module):`" in message, (way, message)
        assert finite


class Keeps(Callback):
    """Makes something of the module at the end of every epoch."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with full_parameters(pl_module):
            self.made.append([_made(way, pl_module) for way in ("deepcopy", "save", "trace")])


def test_copies_in_the_middle_of_a_fit() -> None:
    """Also with recomputation, which stands in the modules' forwards then."""

    def play(strategy: Strategy) -> dict[str, Any]:
        if isinstance(strategy, ZeroStrategy):
            stage = int(name_of(strategy)[-1])
            strategy = zero(stage, activations=ActivationPolicy(checkpointing=["Block"]))
        module, keeps = Net(), Keeps()
        fit(strategy, module, callbacks=[keeps], max_epochs=2)
        return {"made": keeps.made, "losses": list(module.losses)}

    results = each_strategy(play)
    assert_same(results)
    assert len(results[0]["ddp"]["made"]) == 2


class CopiesItself(Block):
    """Where a unit computes, its values are there: its pickle is whole."""

    def forward(self, x: Tensor) -> Tensor:
        PICKLES.append(pickle.dumps(self))
        return super().forward(x)


PICKLES: list[bytes] = []


def test_a_copy_in_a_forward_has_no_hook_that_does_anything() -> None:
    def play(strategy: Strategy) -> dict[str, Any]:
        if isinstance(strategy, ZeroStrategy):
            strategy = zero(int(name_of(strategy)[-1]), units=["CopiesItself"])
        PICKLES.clear()
        module = Net(lambda: Stack(CopiesItself(), Block()))
        fit(strategy, module, 2)
        assert not any(b"lightning_zero" in content for content in PICKLES)
        copies = [pickle.loads(pickle.dumps(pickle.loads(content))) for content in PICKLES[:2]]
        return {"losses": module.losses, "copies": [copy.deepcopy(block)(X).detach() for block in copies]}

    assert_same(each_strategy(play))


def test_one_rank_alone_may_call_what_is_whole() -> None:
    """A module without hooks meets nobody: the first rank evaluates, the others wait at the end of the block."""

    def play(rank: int) -> list[Tensor]:
        module, found = Net(), []
        with quiet():
            trainer = fit(zero(3), module)
            with full_parameters(module), torch.no_grad():
                if rank == 0:
                    found.append(module(X))
            with full_parameters(module.model.layers[1]), torch.no_grad():
                if rank == 0:
                    module.model.layers[1](X)
            trainer.validate(module, batches(1), verbose=False)
            with torch.no_grad():
                found.append(module(X))  # the hooks are back: every rank
        return found

    (alone, together), (_,) = run_world(2, play)
    assert torch.equal(alone, together)


def test_the_hooks_come_back_where_they_were() -> None:
    def play(rank: int) -> list[list[str]]:
        calls: list[str] = []

        def note(name: str) -> Callable[..., None]:
            return lambda *_: calls.append(name)

        module = Net()
        block = module.model.layers[0]
        block.register_forward_pre_hook(note("early"))
        block.register_forward_hook(note("early after"))
        with quiet():
            fit(zero(3), module, 1)
        block.register_forward_pre_hook(note("late"))
        block.register_forward_hook(note("late after"))
        tables = block._forward_pre_hooks, block._forward_hooks, block._forward_hooks_always_called
        before = [list(table) for table in tables]
        with full_parameters(module):
            assert [len(table) for table in tables] == [2, 2, 0]
            handle = block.register_forward_pre_hook(note("inside"), prepend=True)
        handle.remove()
        return [before, [list(table) for table in tables]]  # type: ignore[list-item]

    for before, after in run_world(2, play):
        assert before == after


SCRIPT = """
import sys
sys.modules["lightning_zero"] = None  # an import of it raises
import torch
for file in sys.argv[1:]:
    module = torch.load(file, weights_only=False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    torch.save(module(torch.ones(1, 32)), file + ".computed")
"""


def test_a_process_without_this_package_loads_it(tmp_path: Path) -> None:
    def play(rank: int, stage: int, file: Path) -> Tensor:
        module = BoringModel()
        module.layer = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 2))
        with quiet():
            make_trainer(ZeroStrategy(stage=stage, units=["Linear"]), max_steps=2).fit(module)  # type: ignore[arg-type]
            with full_parameters(module):
                if rank == 0:
                    torch.save(module, file)
            with torch.no_grad():
                return module(torch.ones(1, 32))

    expected = {}
    for stage in (1, 3):
        file = tmp_path / f"stage{stage}.pt"
        expected[str(file)] = run_world(2, play, stage, file)[0]
    subprocess.run([sys.executable, "-c", SCRIPT, *expected], check=True, env=subprocess_env(), timeout=120)
    for file, value in expected.items():
        assert torch.equal(torch.load(f"{file}.computed"), value)
