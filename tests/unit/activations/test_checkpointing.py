"""Forwards run again in backward: the same bits, and no trace that it happened."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero._torch import WeakStorage
from lightning_zero.activations import Activations
from lightning_zero.comm import ControlGroup, LocalCollectives
from lightning_zero.comm.control import Met
from lightning_zero.config import ActivationPolicy
from lightning_zero.engine import ZeroEngine
from lightning_zero.offload import MemoryTiers
from lightning_zero.plan.plan import build_plan
from tests.helpers.training import quiet

CPU = torch.device("cpu")
WIDTH = 12
STAGES = (1, 3)


class Calls:
    """Counts forwards, repeated ones too: in memory, past the version, which is out of sight of what repeats them."""

    def __init__(self) -> None:
        self._count = torch.zeros((), dtype=torch.long)

    def note(self) -> None:
        self._count.data.add_(1)

    def __len__(self) -> int:
        return int(self._count)


class Layer(nn.Module):
    """What is repeated. Subclasses say what happens in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = Calls()

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return F.gelu(self.linear(x))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.note()
        return x + self.inside(x, *args, **kwargs)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Places(ControlGroup):
    """Notes where the ranks would meet."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[str] = []

    def meet(self, place: str, values: Sequence[int] = (), marks: Sequence[int] = ()) -> Met:
        self.seen.append(place)
        return super().meet(place, values, marks)


class Run:
    """A model in an engine of one rank, with a policy or without.

    Args:
        layer: its layers.
        stage: of the engine.
        policy: what to recompute; ``None``: nothing.
        model: how layers are put together.
    """

    def __init__(
        self,
        layer: Callable[[], nn.Module] = Layer,
        stage: int = 3,
        policy: Any = None,
        model: Callable[..., nn.Module] = Model,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.module = model(layer)
        name = type(self.module.layers[0]).__name__
        self.units = [name if name != "OptimizedModule" else type(self.module.layers[0]._orig_mod).__name__]
        plan = build_plan(self.module, stage=stage, world_size=1, units=self.units)
        self.control = Places()
        self.engine = ZeroEngine(self.module, plan, LocalCollectives(), self.control, MemoryTiers(CPU))
        self.engine.prepare_training()
        self.activations = None
        if policy is not None:
            chosen = policy if isinstance(policy, ActivationPolicy) else ActivationPolicy(checkpointing=policy)
            self.activations = Activations(self.engine, chosen, self.units)

    def step(
        self, forward: Callable[[nn.Module, Tensor], Tensor] | None = None, seed: int = 1, told: bool = True
    ) -> dict[str, Tensor]:
        """One forward and backward, which the engine is told of or not. Returns the loss and all gradients."""
        torch.manual_seed(seed)
        random.seed(seed)
        x = torch.randn(8, WIDTH, requires_grad=True)
        with quiet():
            policy = self.activations.training() if self.activations else contextlib.nullcontext()
            with policy, self.engine.step("training_step"):
                loss = (forward or _whole_model)(self.module, x).square().mean()
            with self.engine.backward() if told else contextlib.nullcontext():
                loss.backward()
        return {"loss": loss.detach(), "x": x.grad, **self.gradients()}

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, shard in self.engine.shards.items():
            if shard.parameter is not None and shard.parameter.grad is not None:
                found[name] = shard.parameter.grad.clone()
                shard.parameter.grad = None
        return found

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def assert_exact(layer: Callable[[], nn.Module], stage: int, steps: int = 2, **options: Any) -> Run:
    """Every step and all buffers are the same as without recomputation, and it did happen."""
    plain, again = Run(layer, stage), Run(layer, stage, "units")
    for seed in range(steps):
        assert_same(plain.step(seed=seed, **options), again.step(seed=seed, **options))
        assert_same(plain.buffers(), again.buffers())
    for before, after in zip(plain.module.layers, again.module.layers, strict=True):
        if layer is not Mixed:  # its own gradient needs a second forward of its own
            assert len(after.calls) == 2 * len(before.calls)
    return again


# ---------------------------------------------------------------------------------------------------------------------
# The same bits


class Dropout(Layer):
    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return F.dropout(self.linear(F.dropout(x, 0.3)), 0.3)


class Chance(Layer):
    """Python's own random numbers decide."""

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.linear(x) * random.random() if random.random() < 0.5 else x.sin() * random.random()


class Normalised(Layer):
    """Running statistics, and torch's own parametrization with state that every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.spectral(self.norm(self.linear(x)))


class Codebook(Layer):
    """A large buffer that every forward reads and moves, a replaced one, and a counter that decides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5000, WIDTH))
        self.register_buffer("previous", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.linear(x) * self.codes[:8].clone() + self.previous
        if int(self.count) % 2:
            y = y.sin()
        with torch.no_grad():
            self.codes.mul_(0.5).add_(y.mean())
            self.count += 1
            self.previous = y.mean(0).detach()
        return y


class Attention(Layer):
    """Torch's attention computes otherwise if its three arguments are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.attention(x, *(args or (x, x)))[0] + self.linear(x)


class Stateful(Layer):
    """Plain attributes decide, and tensors are left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = 0, None

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.count += 1
        first = not hasattr(self, "scale")
        self.scale = 0.5 * self.count
        y = (self.linear(x) * (2 if first or self.count % 3 == 0 else 3)).sin()
        y = F.dropout(y, 0.5, self.training) * self.scale
        self.last = y if self.last is None else y.detach() + self.last.detach()
        return y


class Hidden(Layer):
    """Tensors of the last call, with a graph and without, that are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: Tensor | None = None
        self.pair: tuple[Any, ...] = (torch.zeros(8, WIDTH), 0)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.linear(x) + self.mean + self.pair[0].detach() * self.pair[1]
        if self.previous is not None:
            y = (y + self.previous).sin()
        self.previous, self.pair = y.detach(), (y * 2, self.pair[1] + 1)
        self.mean = y.detach().mean(0)
        return y * 2


class Frozen(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)


class Mixed(Layer):
    """Autocast inside, and a gradient inside."""

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x).float()
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (direction,) = torch.autograd.grad(self.linear(z).square().sum(), z)
        return y.tanh() - 0.1 * direction


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layer", [Layer, Dropout, Chance, Stateful, Hidden, Attention, Frozen, Mixed])
def test_exact(layer: type[Layer], stage: int) -> None:
    assert_exact(layer, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("layer", "what"),
    [(Normalised, "BatchNorm1d.num_batches_tracked|BatchNorm1d.running_mean"), (Codebook, "Codebook.codes")],
)
def test_buffers_that_the_forward_changes_are_refused_by_name(layer: type[Layer], what: str, stage: int) -> None:
    message = rf"({what}) was changed in place by the forward of 'layers.0'.* other than {layer.__name__}"
    with pytest.raises(RuntimeError, match=message):
        Run(layer, stage, "units").step()


@pytest.mark.parametrize("stage", STAGES)
def test_running_statistics_that_are_frozen_are_exact(stage: int) -> None:
    class FrozenNorm(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH).eval()

        def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self.norm(self.linear(x))

    assert_exact(FrozenNorm, stage)


class Plain(nn.Module):
    """Nothing that the compiler would look at twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.sin()).cos() * self.scale


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_layers_are_run_again_compiled(in_place: bool, stage: int) -> None:
    torch._dynamo.reset()
    runs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        code = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *args: (runs.append(1), code(*args))[1]

    def compiled() -> nn.Module:
        layer = Plain()
        if in_place:
            layer.compile(backend=backend)
        return layer if in_place else torch.compile(layer, backend=backend)

    plain, again = Run(compiled, stage), Run(compiled, stage, "units")
    before = [dict(vars(module)) for module in plain.module.modules()]
    for seed in range(3):
        runs.clear()
        expected = plain.step(seed=seed)
        once = len(runs)
        assert_same(expected, again.step(seed=seed))
        assert len(runs) == 3 * once
    again.activations.detach()
    assert [vars(module).keys() for module in again.module.modules()] == [names.keys() for names in before]
    assert_same(plain.step(seed=7), again.step(seed=7))


def _whole_model(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def _several_calls(module: nn.Module, x: Tensor) -> Tensor:
    for layer in (*module.layers, module.layers[0], module.layers[0]):
        x = layer(x)
    return x


def _evaluation_between(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    with torch.no_grad():
        scale = module(x).mean()
    return y * scale


def _gradient_of_inputs(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    (direction,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return y + direction


def _with_itself(module: nn.Module, x: Tensor) -> Tensor:
    x = x.unsqueeze(1)  # in a batch: else torch makes three objects of it
    for layer in module.layers:
        x = layer(x, x, x)
    return x


CALLS = [_several_calls, _evaluation_between, _gradient_of_inputs]


def _checkpoint_of_the_user(module: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        *((layer, forward) for layer in (Dropout, Hidden) for forward in CALLS),
        (Attention, _with_itself),
        (Dropout, _checkpoint_of_the_user),  # which repeats this one's first forward
    ],
)
def test_exact_however_it_is_called(layer: type[Layer], stage: int, forward: Any) -> None:
    plain = Run(layer, stage)
    expected = plain.step(forward)
    for offload in (False, True):
        again = Run(layer, stage, ActivationPolicy(checkpointing="units", offload=offload, min_kib=0))
        assert_same(expected, again.step(forward))
        assert_same(plain.buffers(), again.buffers())


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Hiding(Layer):
    """Nobody can see its output, and its loss does not come through it: no hook can tell that its backward begins."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.note()
        self.auxiliary = self.linear(x.hidden).square().mean()
        return Opaque(x.hidden + F.gelu(self.linear(x.hidden)))


class HidingModel(Model):
    def forward(self, x: Tensor) -> Tensor:
        hidden = Opaque(self.stem(x))
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.hidden + sum(layer.auxiliary for layer in self.layers)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("forward", [_whole_model, _gradient_of_inputs])
def test_weights_are_there_whatever_the_outputs_are(forward: Any, stage: int) -> None:
    plain, again = (Run(Hiding, stage, policy, HidingModel) for policy in (None, "units"))
    for seed in range(3):
        told = seed % 2 == 0
        assert_same(plain.step(forward, seed, told), again.step(forward, seed, told))
    assert set(plain.control.seen) == set(again.control.seen), "a second forward is part of a backward, not a forward"


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.layers = nn.ModuleList([Dropout(), Dropout()])
        self.act = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.note()
        for layer in self.layers:
            x = layer(x)
        return self.act(x) * self.scale


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (["Outer"], (2, 2)),
        (["Dropout"], (1, 2)),
        (["Sequential"], (1, 1)),
        (["Model"], (2, 2)),
        # Once in the outer one's forward, once when that is run again, once for its own backward.
        (["Outer", "Dropout"], (2, 3)),
    ],
    ids=str,
)
def test_classes_around_units_inside_of_units_and_in_each_other(policy: list[str], calls: Any, stage: int) -> None:
    def model(layer: Callable[[], nn.Module]) -> nn.Module:
        return Model(layer, 2)

    plain, again = (Run(Outer, stage, chosen, model) for chosen in (None, policy))
    assert_same(plain.step(), again.step())
    outer = again.module.layers[0]
    assert (len(outer.calls), len(outer.layers[0].calls)) == calls
    assert_same(plain.step(seed=2), again.step(seed=2))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


class Cache(Layer):
    """Writes to what it is given, as caches of keys and values do."""

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache: list[Tensor] = kwargs["cache"]["seen"]
        y = self.linear(x) + sum(cache, torch.zeros(())) * kwargs["cache"]["scale"]
        cache.append(y)
        return y


@pytest.mark.parametrize("stage", STAGES)
def test_containers_are_the_callers_own_and_are_written_once(stage: int) -> None:
    lengths = []

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        cache: dict[str, Any] = {"seen": [x * 2], "scale": x.mean()}
        for layer in module.layers:
            x = layer(x, cache=cache)
        lengths.append(cache["seen"])
        return x

    assert_exact(Cache, stage, forward=forward)
    assert [len(seen) for seen in lengths] == [4] * 4


class KeysAndValues:
    """An object that all layers write to."""

    def __init__(self, x: Tensor) -> None:
        self.layers: list[dict[str, Tensor]] = []
        self.total = x * 2
        self.tokens = 0

    def add(self, keys: Tensor) -> Tensor:
        self.layers.append({"keys": keys})
        self.total = self.total + keys
        self.tokens += 1
        return self.total * self.tokens + sum(layer["keys"] for layer in self.layers)


class Remembering(Layer):
    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return kwargs["cache"].add(self.linear(x)).sin()


def test_objects_among_the_arguments_that_the_forward_changes_are_refused_by_name() -> None:
    message = r"An argument of class KeysAndValues was changed .*'layers.1'.*use_cache=False.* other than Remembering"
    with pytest.raises(RuntimeError, match=message):
        Run(Remembering, policy="units").step(lambda module, x: module.layers[1](x, cache=KeysAndValues(x)))


class Scaled(Layer):
    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.linear(x) * kwargs["scale"]["by"][0]


@pytest.mark.parametrize("stage", STAGES)
def test_nested_keyword_arguments_that_are_changed_later_are_refused(stage: int) -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        scale = x.detach().mean(0) + 1
        y = module.layers[0](x, scale={"by": [scale]})
        scale.add_(1)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Run(Scaled, stage, "units").step(forward)


# ---------------------------------------------------------------------------------------------------------------------
# Never with other weights or buffers


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_were_changed_are_refused(stage: int) -> None:
    run = Run(stage=stage, policy="units")
    x = torch.randn(8, WIDTH, requires_grad=True)
    with run.activations.training(), run.engine.step("training_step"):
        loss = run.module(x).sum()
    run.engine.before_optimizer_step("SGD")
    run.engine.after_optimizer_step({unit.index: unit.parameters for unit in run.engine.units})
    with (
        pytest.raises(RuntimeError, match=r"weights of .* were changed .* between this forward"),
        run.engine.backward(),
    ):
        loss.backward()


class Masked(Layer):
    """A large buffer that does not change by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5000, WIDTH))

    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.linear(x) * self.mask[:8].clone()


def test_buffers_that_change_before_the_backward_are_refused_by_name() -> None:
    run = Run(Masked, policy="units")
    run.step()

    def change(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        module.layers[1].mask.mul_(2)
        return y

    with pytest.raises(RuntimeError, match=r"Masked.mask was changed in place after the forward of 'layers.1'"):
        run.step(change)
    mask = run.module.layers[1].mask
    run.step()
    assert run.module.layers[1].mask is mask


class SetFromOutside(Layer):
    def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return F.gelu(self.linear(x) * self.scale)


@pytest.mark.parametrize("stage", STAGES)
def test_attributes_that_the_parent_sets_for_each_call(stage: int) -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        for turn in range(2):
            for layer in module.layers:
                layer.scale = x.mean() * (turn + 1)
                x = layer(x)
        return x

    assert_exact(SetFromOutside, stage, forward=forward)


@pytest.mark.parametrize("stepping", [False, True])
def test_no_chain_of_graphs_grows_over_forwards_without_a_backward(stepping: bool) -> None:
    class Chained(Layer):
        last: Any = None

        def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            y = self.linear(x)
            self.last, self.pair = y, (y.sin(), 1)
            if stepping:
                self.all, self.aux = [y.cos()], {"loss": y.exp()}
            made.append(WeakStorage(y))
            return y

    made: list[WeakStorage] = []
    run = Run(Chained, policy="units")
    for seed in range(5):
        torch.manual_seed(seed)
        with run.activations.training(), run.engine.step("training_step"):
            run.module(torch.randn(8, WIDTH, requires_grad=True))
        if stepping:
            run.engine.before_optimizer_step("SGD")
            run.engine.after_optimizer_step({unit.index: unit.parameters for unit in run.engine.units})
    # Of each layer, what it has, and what it had when its last graph was made
    assert sum(memory.lock() is not None for memory in made) <= 2 * 3


def test_attributes_are_what_the_first_forward_left() -> None:
    run = Run(Stateful, policy="units")
    left: list[tuple[int, Tensor]] = []

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        left.extend((layer.count, layer.last) for layer in module.layers)
        module.eval()  # the second forward drops out all the same
        return y

    plain = Run(Stateful)
    for seed in range(3):
        assert_same(plain.step(forward, seed), run.step(forward, seed))
        left.clear()
        run.step(forward, seed)
        plain.step(forward, seed)
        for layer, (count, last) in zip(run.module.layers, left[:3], strict=True):
            assert (layer.count, layer.training) == (count, False)
            assert layer.last is last
        for module in (plain.module, run.module):
            module.train()


# ---------------------------------------------------------------------------------------------------------------------
# No trace


@contextlib.contextmanager
def counting(layer: nn.Module) -> Iterator[list[str]]:
    seen: list[str] = []
    handles = [
        layer.register_forward_pre_hook(lambda *_: seen.append("before")),
        layer.register_forward_hook(lambda *_: seen.append("after")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_the_user_run_once(stage: int) -> None:
    run = Run(stage=stage, policy="units")
    with counting(run.module.layers[1]) as seen:
        run.step()
    assert seen == ["before", "after"]
    assert len(run.module.layers[1].calls) == 2


def test_only_with_gradients() -> None:
    run = Run(policy="units")
    with torch.no_grad(), run.engine.step("validation_step"):
        run.module(torch.randn(8, WIDTH))
    assert [len(layer.calls) for layer in run.module.layers] == [1, 1, 1]


def test_nothing_is_kept_of_the_inside() -> None:
    kept: list[WeakStorage] = []

    class Noting(Layer):
        def inside(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            hidden = self.linear(x).sin()
            kept.append(WeakStorage(hidden))
            return hidden.cos()

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        kept.append(WeakStorage(y))
        alive.append([memory.lock() is not None for memory in kept])
        return y

    for policy, expected in ((None, [True] * 4), ("units", [False, False, False, True])):
        kept.clear()
        alive: list[list[bool]] = []
        Run(Noting, policy=policy).step(forward)
        assert alive == [expected]


@pytest.mark.parametrize("stage", STAGES)
def test_names_and_modules_are_as_they_were_and_detach_undoes_all(stage: int) -> None:
    run = Run(Hidden, stage)
    names = [list(run.module.state_dict(keep_vars=True)), [name for name, _ in run.module.named_modules()]]
    before = [dict(vars(module)) for module in run.module.modules()]
    run.module.layers[0].forward = own = lambda x: Layer.forward(run.module.layers[0], x)
    activations = Activations(run.engine, ActivationPolicy(checkpointing=["Hidden"]), run.units)
    assert run.module.layers[0].forward is not own
    assert [list(run.module.state_dict(keep_vars=True)), [name for name, _ in run.module.named_modules()]] == names
    activations.detach()
    activations.detach()
    assert run.module.layers[0].forward is own
    del run.module.layers[0].forward
    assert [vars(module) for module in run.module.modules()] == before


def test_copies_have_an_ordinary_forward() -> None:
    run = Run(stage=1, policy="units")
    layer = run.module.layers[1]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(run.module).layers[1]):
        with torch.no_grad():
            other.linear.weight.zero_()
            other.linear.bias.fill_(1)
            x = torch.randn(8, WIDTH)
            assert torch.equal(other(x), x + F.gelu(torch.ones(WIDTH)))
        assert (len(other.calls), len(layer.calls)) == (1, 0)
        other(x).sum().backward()
        assert len(other.calls) == 2


def test_a_policy_that_does_not_fit_leaves_the_module_alone() -> None:
    run = Run()
    with pytest.raises(ValueError, match=r"names \['Missing'\]"):
        Activations(run.engine, ActivationPolicy(checkpointing=["Layer", "Missing"]))
    assert not any("forward" in vars(module) for module in run.module.modules())
