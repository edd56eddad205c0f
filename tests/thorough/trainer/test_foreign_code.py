"""Models that do unusual things to parameters, in every stage: the bits of DDP, or an error by name at set-up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_zero import ActivationPolicy, ZeroStrategy
from tests.helpers.cases import WIDTH, Block, Stack
from tests.helpers.runs import STAGES, Net, assert_same, fit, made, quiet, raised
from tests.helpers.world import run_world


class Linear(Net):
    """An optimizer whose steps are linear in the gradients, so that nothing hides a wrong one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.objective(*self.data(batch_idx))
        self.losses.append(loss.detach().clone())
        return loss

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


class Complex(Block):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 10)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (y.to(torch.complex64) @ self.turn).real


class Assorted(Block):
    """No elements, one element, no floating-point elements, another dtype, a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 3 > 0, requires_grad=False)
        self.precise = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.shifts = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)[..., self.order] * self.mask * self.scale + (self.empty * x[0, :1]).sum()
        for shift in self.shifts:
            x = x + shift
        for name in self.scales:
            x = x * self.scales[name].tanh()
        return (x * self.precise).float()


class Forwarding(nn.Module):
    """Attributes of a module inside are looked up on this one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.gelu(self.up(x)), self.down.weight, self.down.bias)


def parametrised(change: Callable[..., Any], **options: Any) -> Callable[[], nn.Module]:
    """A stack in whose units and root ``change`` was done to a weight."""

    class Parametrised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(WIDTH, WIDTH)
            change(self.square, "weight", **options)
            change(self.up, "weight", **options)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.square(x)

    def build() -> nn.Module:
        model = Stack(Parametrised(), Parametrised())
        change(model.head, "weight", **options)
        return model

    return build


class SparseRows(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.embedding(torch.arange(len(x)) * 3 % 11))


def shared() -> nn.Module:
    model = Stack()
    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]
    model.head.weight = model.stem.weight
    return model


class Named(nn.Parameter):
    """A class of parameters with an attribute."""

    tag: str

    def __new__(cls, data: Tensor, requires_grad: bool = True, tag: str = "") -> Any:
        made: Any = super().__new__(cls, data, requires_grad)
        made.tag = tag
        return made


class OwnClass(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem.weight = Named(self.stem.weight.data, tag="root")
        self.layers[1].up.weight = Named(self.layers[1].up.weight.data, requires_grad=False, tag="unit")  # type: ignore

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.stem.weight, Named)
        assert self.stem.weight.tag == "root"
        return super().forward(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


class ScriptedFunction(Block):
    """A weight goes into TorchScript, which is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.function = _script(linear)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.function(self.norm(x), self.up.weight, self.up.bias)))


class NormedConvolutions(nn.Module):
    """Their weights are computed, and each time they are asked for changes what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parametrizations.spectral_norm(nn.Conv1d(1, 1, 3, padding=1)) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.last(x.squeeze(1))


class Hyper(nn.Module):
    """One module makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH * WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.made = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x.mean(0)).view(WIDTH, WIDTH) / 10
        for layer in self.layers:
            x = layer(x)
        return functional_call(self.made, {"weight": weight}, (x,))


class FunctionalCall(Linear):
    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(self.model, dict(self.model.named_parameters()), (x,)), y)


class FunctionalScaled(Linear):
    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        values = {name: parameter * 1.5 for name, parameter in self.model.named_parameters()}
        return F.mse_loss(functional_call(self.model, values, (x,)), y)


class Encoders(nn.Module):
    """torch evaluates it on a path of its own, if it likes the weights of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 3 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([[False, False, True]] * x.shape[0])
        return self.encoder(x.unsqueeze(1).expand(-1, 3, -1), src_key_padding_mask=mask).mean(1)


class Padded(Linear):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.model(self.data(batch_idx)[0]).detach().clone())


class Target(Linear):
    """A target network: the same layers, called with parameters that another module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.ParameterDict({n.replace(".", "/"): p.detach() / 2 for n, p in self.model.named_parameters()})

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        values = {name.replace("/", "."): parameter for name, parameter in self.target.items()}
        return F.mse_loss(self.model(x), functional_call(self.model, values, (x,)))


class Mapped(Linear):
    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(vmap(self.model)(x), y)


class InputGradients(Linear):
    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        self.losses.append(grad(lambda value: self.model(value).sum())(x))
        return super().objective(x, y)


class SampleGradients(Linear):
    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.model, parameters, (x,)), y)

        values = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.losses += vmap(grad(loss), (None, 0, 0))(values, x, y).values()
        return super().objective(x, y)


class PlainGradients(Linear):
    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        self.losses += torch.autograd.grad(self.model(x).sum(), x)
        return super().objective(x, y)


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


class Checkpointed(Linear):
    """DDP cannot do it reentrantly, with the same numbers."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__()
        self.reentrant, self.options = reentrant, options

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        reentrant = self.reentrant and not isinstance(self.trainer.strategy, DDPStrategy)
        x = self.model.stem(x)
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant, **self.options)
        return self.model.head(x)


def _script(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(what)


def _trace(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, torch.ones(3, WIDTH))


def _scripted_head() -> nn.Module:
    model = Stack()
    model.head = _script(model.head)
    return model


ALL = tuple(STAGES)
WHOLE = ("stage 1", "stage 2")
CASES: dict[str, tuple[Callable[[], Linear], tuple[str, ...]]] = {
    "shared": (lambda: Linear(shared), ALL),
    "complex": (lambda: Linear(lambda: Stack(Complex(), Complex())), ALL),
    "assorted": (lambda: Linear(lambda: Stack(Assorted(), Assorted())), ALL),
    "forwarding": (lambda: Linear(lambda: Stack(Forwarding(), Forwarding())), ALL),
    "sparse": (lambda: Linear(SparseRows), ALL),
    "own class": (lambda: Linear(OwnClass), ALL),
    "weight norm": (lambda: Linear(parametrised(parametrizations.weight_norm)), ALL),
    "spectral norm": (lambda: Linear(parametrised(parametrizations.spectral_norm)), ALL),
    "orthogonal": (lambda: Linear(parametrised(parametrizations.orthogonal)), ALL),
    "spectral norm of convolutions": (lambda: Linear(NormedConvolutions), ALL),
    "functional call with parameters": (Target, ALL),
    "selective checkpoint": (lambda: Checkpointed(False, context_fn=SELECTIVE), ALL),
    "encoder, evaluated with padding": (lambda: Padded(Encoders), ALL),
    "old spectral norm": (lambda: Linear(parametrised(nn.utils.spectral_norm)), ALL),
    "pruned": (lambda: Linear(parametrised(prune.l1_unstructured, amount=0.3)), ALL),
    "hypernetwork": (lambda: Linear(Hyper), ALL),
    "functional call": (FunctionalCall, ALL),
    "functional call with other weights": (FunctionalScaled, ALL),
    "vmap": (Mapped, ALL),
    "gradients of inputs": (PlainGradients, ALL),
    "torch.func.grad": (InputGradients, WHOLE),
    "gradients per sample": (SampleGradients, WHOLE),
    "checkpoint": (lambda: Checkpointed(False), ALL),
    "reentrant checkpoint": (lambda: Checkpointed(True), ALL),
    "symbols": (lambda: Linear(lambda: torch.fx.symbolic_trace(Stack())), ALL),
    "symbols in units": (lambda: Linear(lambda: Stack(*map(torch.fx.symbolic_trace, (Block(), Block())))), ALL),
    "script of a function": (lambda: Linear(lambda: Stack(ScriptedFunction(), ScriptedFunction())), ALL),
    "script without parameters": (lambda: Linear(lambda: Stack(Block(), _script(nn.GELU()), Block())), ALL),
    "script of a leaf": (lambda: Linear(lambda: Stack(Block(), _script(nn.Linear(WIDTH, WIDTH)), Block())), WHOLE),
    "script of the head": (lambda: Linear(_scripted_head), WHOLE),
    "script of all": (lambda: Linear(lambda: _script(Stack())), WHOLE),
    "trace": (lambda: Linear(lambda: Stack(_trace(Block()), _trace(Block()))), WHOLE),
}


def _strategies() -> dict[str, Strategy]:
    found: dict[str, Strategy] = {"ddp": DDPStrategy(find_unused_parameters=True)}
    return found | {name: ZeroStrategy(stage=stage) for name, stage in STAGES.items()}  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*used in a forward or backward while no module")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_ddp(name: str) -> None:
    make, stages = CASES[name]

    def play(rank: int) -> dict[str, dict[str, Any]]:
        results = {}
        for label in ("ddp", *stages):
            torch.manual_seed(1234)
            with quiet():
                module = make()
                results[label] = made(module, fit(_strategies()[label], module, 3, val=1))
        return results

    assert_same(run_world(2, play, timeout=200), stages)


# ---------------------------------------------------------------------------------------------------------------------
# Refused


class Distributed(nn.Module):
    """What a rank holds of a tensor, as tensor parallelism keeps it."""

    def __init__(self, placement: Any, buffer: bool = False) -> None:
        super().__init__()
        whole = distribute_tensor(torch.eye(WIDTH) * 2, init_device_mesh("cpu", (2,)), [placement])
        if buffer:
            self.register_buffer("weight", whole)
        else:
            self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.full_tensor())  # type: ignore[operator]


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.register_buffer("shift", torch.quantize_per_tensor(torch.ones(WIDTH), 0.1, 0, torch.qint8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.dequantize()  # type: ignore[operator]


def _same_memory() -> nn.Module:
    model = Stack()
    model.head.weight.data = model.stem.weight.data
    return model


def _between(module: nn.Module) -> nn.Module:
    return Stack(Block(), module, Block())


REFUSED: dict[str, tuple[Callable[[], Linear], tuple[str, ...], tuple[str, ...]]] = {
    "frozen shard": (
        lambda: Linear(lambda: _between(Distributed(Shard(0)))),
        ALL,
        ("model.layers.1.weight", "DTensor"),
    ),
    "frozen copy": (lambda: Linear(lambda: _between(Distributed(Replicate()))), ALL, ("layers.1.weight", "DTensor")),
    "shard in a buffer": (
        lambda: Linear(lambda: _between(Distributed(Shard(0), buffer=True))),
        ALL,
        ("Buffer 'model.layers.1.weight'", "DTensor"),
    ),
    "quantized buffer": (lambda: Linear(lambda: _between(Quantized())), ALL, ("Buffer 'model.layers.1.shift'",)),
    "lazy": (lambda: Linear(lambda: _between(nn.LazyLinear(WIDTH))), ALL, ("'model.layers.1.weight'", "lazy")),
    "same memory": (lambda: Linear(_same_memory), ALL, ("'model.stem.weight'", "'model.head.weight'", "same memory")),
    "torch.func.grad": (InputGradients, ("stage 3",), ("torch.func", "torch.autograd.grad", "full_parameters")),
}


def test_refused_by_name_on_every_rank() -> None:
    """One after the other in one world: none leaves anything behind that the next could stumble over."""

    def play(rank: int) -> dict[str, str]:
        told = {}
        for name, (make, stages, _) in REFUSED.items():
            for stage in stages:
                errors: list[str] = []
                with quiet(), raised(errors):
                    fit(_strategies()[stage], make(), 2)
                told[f"{name}, {stage}"] = "".join(errors)
        with quiet():
            fit(_strategies()["stage 3"], Linear(), 2)
        return told

    for told in run_world(2, play, timeout=200):
        for name, (_, stages, parts) in REFUSED.items():
            for stage in stages:
                for part in parts:
                    assert part in told[f"{name}, {stage}"], (name, stage, told[f"{name}, {stage}"])


def test_a_unit_that_is_not_there_on_every_rank() -> None:
    """In every stage, and in what is to be recomputed."""

    def play(rank: int) -> list[str]:
        told: list[str] = []
        for stage in (1, 2, 3):
            for options in ({"units": ["Nope"]}, {"activations": ActivationPolicy(checkpointing=["Nope"])}):
                with quiet(), raised(told):
                    fit(ZeroStrategy(stage=stage, **options), Linear(), 2)  # type: ignore[arg-type]
        return told

    for told in run_world(2, play, timeout=100):
        assert len(told) == 6
        for message in told:
            assert message.startswith("ValueError: "), message
            assert "names ['Nope']" in message, message
            assert "Block, LayerNorm, " in message, message  # what is there
