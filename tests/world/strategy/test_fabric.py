"""Training loops of one's own: what Fabric does under DDP, it does in every stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import (
    ActivationPolicy,
    CheckpointPolicy,
    HostOffload,
    ZeroFabricStrategy,
    ZeroPrecision,
    ZeroStrategy,
    consolidate_checkpoint,
    full_gradient,
    full_optimizer_state,
    full_parameters,
    grad_norm,
    load_full_state_dict,
)
from lightning_zero.errors import ParameterAccessError
from tests.helpers.rows import Row, in_one_world
from tests.helpers.runs import Net, assert_same, batches, quiet
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

STAGES = {f"stage {stage}": stage for stage in (1, 2, 3)}
WIDTH = 8


class Convolutional(nn.Module):
    """Running statistics, and a bias whose gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 3))
        self.head = nn.Linear(4 * (WIDTH - 4), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.unsqueeze(1)).flatten(1))


class Attentive(nn.Module):
    """torch's own transformer layers, with dropout, and tied weights at both ends."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x).unsqueeze(0)).squeeze(0))


class Residual(nn.Module):
    """Adds what it is called with to what it computes, so that the dtype of that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()) + x * scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WIDTH)),
    "convolutional": Convolutional,
    "attentive": Attentive,
    "residual": Residual,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def launched(strategy: Any, world_size: int = 2, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def zero(stage: int, **options: Any) -> ZeroFabricStrategy:
    """Every layer a unit."""
    return ZeroFabricStrategy(stage=stage, **{"units": ["Linear"], **options})  # type: ignore[arg-type]


def data(index: int, rank: int) -> tuple[Tensor, Tensor]:
    both = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(100 * index + rank))
    return both[0], both[1]


def built(name: str = "mlp") -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def started(strategy: Any, name: str = "mlp") -> tuple[Fabric, Any, Any]:
    fabric, module = launched(strategy), built(name)
    return fabric, *fabric.setup(module, OPTIMIZERS["AdamW"](module.parameters()))


def train(
    fabric: Fabric, model: Any, optimizer: Any, steps: range, per_step: int = 1, clip: Mapping[str, float] | None = None
) -> list[Tensor]:
    """The loop of a user; gives losses and norms."""
    seen = []
    for step in steps:
        for micro in range(per_step):
            x, y = data(per_step * step + micro, fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=micro < per_step - 1):
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss)
            seen.append(loss.detach())
        norm = fabric.clip_gradients(model, optimizer, **(clip or {"clip_val": 0.02}))  # type: ignore[arg-type]
        seen += [] if norm is None else [norm]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def values(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers, whole."""
    with full_parameters(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def compared(play: Callable[[Any], dict[str, Any]]) -> Callable[[int], dict[str, dict[str, Any]]]:
    """What a rank does to play with each strategy."""

    def act(rank: int) -> dict[str, dict[str, Any]]:
        with quiet():
            return {"ddp": play(DDPStrategy()), **{name: play(zero(stage)) for name, stage in STAGES.items()}}

    return act


def same(play: Callable[[Any], dict[str, Any]], bound: float = 0.0) -> Row:
    assert_same((yield compared(play)), bound=bound)


def a_loop_does_what_it_does_under_ddp(model: str, kind: str, joint: bool) -> Row:
    def play(strategy: Any) -> dict[str, Any]:
        fabric, module = launched(strategy), built(model)
        wrapped: Any
        if joint:
            wrapped, optimizer = fabric.setup(module, OPTIMIZERS[kind](module.parameters()))
        else:
            wrapped = fabric.setup_module(module)
            optimizer = fabric.setup_optimizers(OPTIMIZERS[kind](wrapped.parameters()))
        losses = train(fabric, wrapped, optimizer, range(5))
        wrapped.eval()
        with torch.no_grad():
            losses.append(wrapped(data(77, fabric.global_rank)[0]))
        return {"losses": losses, "weights": values(wrapped)}

    assert_same((yield compared(play)))


def test_three_ranks() -> None:
    """Sums over them are rounded in another order."""

    def play(strategy: Any) -> dict[str, Any]:
        fabric, module = launched(strategy, 3), built()
        model, optimizer = fabric.setup(module, OPTIMIZERS["AdamW"](module.parameters()))
        return {"losses": train(fabric, model, optimizer, range(4)), "weights": values(model)}

    assert_same(run_world(3, compared(play)), bound=1e-5)


def offload_and_recomputation(strategy: Any) -> dict[str, Any]:
    if isinstance(strategy, ZeroFabricStrategy):
        placement = strategy.settings.placement
        offload = HostOffload(parameters=placement.shards_parameters)
        stage = 1 + placement.shards_gradients + placement.shards_parameters
        strategy = zero(stage, offload=offload, activations=ActivationPolicy(checkpointing=["Linear"]))
    fabric, model, optimizer = started(strategy, "attentive")
    return {"losses": train(fabric, model, optimizer, range(4)), "weights": values(model)}


def accumulation_by_what_ddp_s_wrapper_has() -> Row:
    def play(strategy: Any) -> dict[str, Any]:
        fabric, model, optimizer = started(strategy)
        wrapped: Any = model._forward_module
        assert wrapped.module is model.module
        for index in range(9):
            x, y = data(index, fabric.global_rank)
            wrapped.require_backward_grad_sync = index % 3 != 1
            with wrapped.no_sync() if index % 3 == 0 else nullcontext():
                fabric.backward(F.mse_loss(model(x), y))
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return {"weights": values(model)}

    found = yield compared(play)
    assert_same(found, ["stage 1"])
    assert_same(found, ["stage 2", "stage 3"], bound=1e-5)


def accumulation_and_clipping(exact: tuple[str, ...] = (), **clip: float) -> Row:
    """``zero1`` adds up as DDP does; the others average every micro-step, and norms are summed in ``float64``."""

    def play(strategy: Any) -> dict[str, Any]:
        fabric, model, optimizer = started(strategy)
        return {"seen": train(fabric, model, optimizer, range(5), 2, clip), "weights": values(model)}

    found = yield compared(play)
    assert_same(found, exact)
    assert_same(found, bound=1e-5)


def precisions(precision: Any) -> Row:
    """Inputs and outputs are converted as Fabric does it; fp16 has a loss scale, under which steps are skipped."""

    def play(strategy: Any) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)  # the first steps overflow
        plugin = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if precision == "16-mixed" else {}
        fabric = launched(strategy, **plugin or {"precision": precision})
        with fabric.init_module():
            module = built("residual")
        model, optimizer = fabric.setup(module, OPTIMIZERS["AdamW"](module.parameters()))
        losses = []
        for index in range(12):
            x, y = data(index, fabric.global_rank)
            out = model(x, scale=y)
            assert out.dtype == torch.float32
            fabric.backward(F.mse_loss(out, y))
            fabric.clip_gradients(model, optimizer, max_norm=1e6, error_if_nonfinite=False)
            if precision == "16-mixed" and index % 2:  # by hand, as in a loop without Fabric
                scaler.step(optimizer.optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            losses.append([out.detach(), scaler.state_dict()])
        assert precision != "16-mixed" or fabric.strategy.precision.scaler is scaler
        return {"losses": losses, "weights": values(model)}

    assert_same((yield compared(play)))


def what_else_a_loop_may_do(strategy: Any) -> dict[str, Any]:
    """Two forwards for one backward, one that is thrown away, a closure, a scheduler, two optimizers, and a write."""
    fabric, module = launched(strategy), built()
    first, last = module[0], module[-1]  # type: ignore[index]
    model, adam, whole = fabric.setup(
        module, OPTIMIZERS["AdamW"](first.parameters()), torch.optim.Adafactor(last.parameters(), lr=0.05)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    absent = isinstance(strategy, ZeroFabricStrategy) and strategy.settings.placement.shards_parameters

    def closure() -> Tensor:
        adam.zero_grad()
        loss = F.mse_loss(model(x), y) + F.l1_loss(model(y), x)
        fabric.backward(loss)
        return loss.detach()

    losses = []
    for index in range(4):
        x, y = data(index, fabric.global_rank)
        if index % 2:
            model(x)
        losses.append(adam.step(closure))
        whole.step()
        whole.zero_grad()
        scheduler.step()
        with full_parameters(model) if absent else nullcontext(), torch.no_grad():
            last.weight.mul_(0.9)
    return {"losses": losses, "lr": adam.param_groups[0]["lr"], "weights": values(model)}


class Adversaries(nn.Module):
    """Two networks that are trained against each other, as parts of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = built(), built()

    def make(self, x: Tensor) -> Tensor:
        return self.maker(x)

    def score(self, x: Tensor) -> Tensor:
        return self.judge(x).mean(dim=1)


def two_networks_against_each_other(strategy: Any) -> dict[str, Any]:
    """Under DDP each is set up for itself."""
    fabric, module = launched(strategy), Adversaries()
    first, second = (OPTIMIZERS["AdamW"](part.parameters()) for part in (module.maker, module.judge))
    make: Any
    score: Any
    if isinstance(strategy, ZeroFabricStrategy):
        model, first, second = fabric.setup(module, first, second)
        model.mark_forward_method("make")
        model.mark_forward_method("score")
        make, score = (lambda x: model.make(x)), (lambda x: model.score(x))
    else:
        make, first = fabric.setup(module.maker, first)
        judge, second = fabric.setup(module.judge, second)
        score = lambda x: judge(x).mean(dim=1)  # noqa: E731
    losses = []
    for index in range(4):
        x, y = data(index, fabric.global_rank)
        with torch.no_grad():
            made = make(x)
        loss = F.softplus(-score(y)).mean() + F.softplus(score(made)).mean()
        fabric.backward(loss)
        losses.append(loss.detach())
        fabric.clip_gradients(module.judge, second, clip_val=0.02)
        second.step()
        second.zero_grad()
        loss = F.softplus(-score(make(x))).mean()
        fabric.backward(loss)
        losses.append(loss.detach())
        first.step()
        first.zero_grad()
        second.zero_grad()
    return {"losses": losses, "weights": values(module)}


def a_lightning_module_that_is_thawed_and_gets_a_param_group(strategy: Any) -> dict[str, Any]:
    """Fabric calls a LightningModule's steps through what ``setup`` gives. DDP does not average what was thawed."""
    fabric, module = launched(strategy), Net()
    module.model.stem.requires_grad_(False)
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.model.layers.parameters(), lr=0.01, eps=1e-4))
    losses = []
    for index in range(6):
        if index == 2:
            optimizer.add_param_group({"params": list(module.model.head.parameters())})
        if index == 4 and isinstance(strategy, ZeroFabricStrategy):
            module.model.stem.requires_grad_(True)
        batch = module.data(index, 0)
        module.data = lambda *_, batch=batch: batch  # type: ignore[method-assign]
        module.log = lambda *_, **__: None  # type: ignore[method-assign]
        loss = model.training_step(None, 0)
        del module.data
        fabric.backward(loss)
        losses.append(loss.detach())
        if index >= 4 and isinstance(strategy, ZeroFabricStrategy):
            assert full_gradient(model, "model.stem.weight") is not None
        optimizer.step()
        module.zero_grad()
    return {"losses": losses, "weights": values(model)}


def a_module_that_was_built_without_memory_has_the_same_values_in_every_stage() -> Row:
    def play(rank: int) -> list[dict[str, Any]]:
        found = []
        for stage in STAGES.values():
            fabric = launched(zero(stage))
            with fabric.init_module(empty_init=True):
                module = built("attentive")
            assert all(parameter.is_meta for parameter in module.parameters())
            model = fabric.setup_module(module)
            optimizer = fabric.setup_optimizers(OPTIMIZERS["AdamW"](model.parameters()))
            found.append({"losses": train(fabric, model, optimizer, range(2)), "weights": values(model)})
        return found

    for first, *others in (yield play):
        assert all(bool(loss.isfinite()) for loss in first["losses"])
        for other in others:
            assert all(map(torch.equal, first["losses"], other["losses"]))
            assert all(torch.equal(value, other["weights"][name]) for name, value in first["weights"].items())


def compiled_layers_train_and_a_compiled_step_is_refused(strategy: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    fabric, module = launched(strategy), built()
    module.compile(backend="eager")
    model, optimizer = fabric.setup(module, OPTIMIZERS["AdamW"](module.parameters()))
    losses = train(fabric, model, optimizer, range(2))
    if isinstance(strategy, ZeroFabricStrategy):
        other = launched(zero(1)).setup_module(torch.compile(built(), backend="eager"))
        with pytest.raises(RuntimeError, match=r"call `model\.compile\(\)`"):
            other(data(0, 0)[0])
    return {"losses": losses, "weights": values(model)}


def collectives_loaders_and_random_numbers(strategy: Any) -> dict[str, Any]:
    Fabric.seed_everything(7, verbose=False)
    torch.rand(3)
    fabric = launched(strategy)
    fabric.barrier()
    rank = torch.tensor([float(fabric.global_rank)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of Lightning's own gather, in torch 2.14
        gathered = fabric.all_gather(rank)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    return {
        "broadcast": fabric.broadcast({"from": fabric.global_rank}, src=1),
        "sum": fabric.all_reduce(rank, reduce_op="sum"),
        "gathered": gathered,
        "data": [batch for (batch,) in loader],
        "random": torch.rand(3),
        "world": (fabric.world_size, fabric.global_rank, fabric.is_global_zero, fabric.local_rank),
    }


def looking_inside(strategy: Any) -> dict[str, Any]:
    """The functions that look inside take what ``setup`` gave."""
    fabric, model, optimizer = started(strategy)
    module = model.module
    fabric.backward(model(data(0, fabric.global_rank)[0]).square().mean())
    sharded = isinstance(strategy, ZeroFabricStrategy)
    gradient = full_gradient(model, "0.weight") if sharded else module[0].weight.grad.clone()  # type: ignore[index]
    norm = grad_norm(model)
    optimizer.step()
    weight = module[0].weight  # type: ignore[index]
    state = full_optimizer_state(model, "0.weight", "exp_avg") if sharded else optimizer.state[weight]["exp_avg"]
    return {"gradient": gradient, "norm": norm, "state": state}


def a_loop_that_clips_and_skips_by_hand(strategy: Any) -> dict[str, Any]:
    """As nanoGPT's, with a log of norms and means of gradients, and steps left out that are not finite."""
    fabric, model, optimizer = started(strategy)
    logged: list[Tensor] = []
    for step in range(4):
        for micro in range(2):
            with fabric.no_backward_sync(model, enabled=micro == 0):
                fabric.backward(model(data(2 * step + micro, fabric.global_rank)[0]).square().mean() / 2)
        if step == 2:
            next(model.parameters()).grad.mul_(float("inf"))  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        means = [p.grad.mean() for p in model.parameters() if p.grad is not None]
        logged += [norm, *means]
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"logged": [x for x in logged if x.isfinite()], "norm": [bool(x.isfinite()) for x in logged]}


def test_loops_do_what_they_do_under_ddp() -> None:
    in_one_world(
        2,
        a_loop_does_what_it_does_under_ddp("mlp", "SGD", joint=False),
        a_loop_does_what_it_does_under_ddp("convolutional", "AdamW", joint=True),
        a_loop_does_what_it_does_under_ddp("attentive", "AdamW", joint=False),
        same(offload_and_recomputation),
        accumulation_by_what_ddp_s_wrapper_has(),
        accumulation_and_clipping(exact=("stage 1",), clip_val=0.02),
        accumulation_and_clipping(max_norm=0.05),
        accumulation_and_clipping(max_norm=0.05, norm_type=float("inf")),
        *map(precisions, ("bf16-mixed", "16-mixed", "bf16-true")),
        same(what_else_a_loop_may_do),
        same(two_networks_against_each_other),
        same(a_lightning_module_that_is_thawed_and_gets_a_param_group),
        a_module_that_was_built_without_memory_has_the_same_values_in_every_stage(),
        same(looking_inside, bound=1e-6),
        same(a_loop_that_clips_and_skips_by_hand, bound=1e-5),
        same(compiled_layers_train_and_a_compiled_step_is_refused),
        another_strategy_does_not_get_the_gradients(),
        same(collectives_loaders_and_random_numbers),
    )


# ------------------------------------------------------------------------------------------------------- checkpoints


def resumed(folder: Path, stage: int, name: str = "last", world_size: int = 2, strict: bool = True) -> tuple[Any, ...]:
    """A new run that goes on from a checkpoint."""
    fabric = launched(zero(stage), world_size)
    module = built("convolutional")
    with torch.no_grad():
        module.head.weight.zero_()  # type: ignore[union-attr, operator]
    model, optimizer = fabric.setup(module, OPTIMIZERS["AdamW"](module.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    teacher = nn.Linear(2, 2)
    state = {
        "teacher": teacher,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 0,
        "best": None,
    }
    rest = fabric.load(folder / name, state, strict=strict)
    return fabric, model, optimizer, state, rest


def saved(fabric: Fabric, path: Path) -> tuple[Any, Any]:
    module = built("convolutional")
    model, optimizer = fabric.setup(module, OPTIMIZERS["AdamW"](module.parameters()))
    train(fabric, model, optimizer, range(3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=-1)
    scheduler.last_epoch = 7
    teacher = nn.Linear(2, 2)
    nn.init.constant_(teacher.weight, 5.0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "teacher": teacher}
    fabric.save(path, {**state, "step": 3, "best": torch.arange(3.0), "note": "x"})
    return model, optimizer


def a_resumed_run_goes_on_as_if_nothing_had_been(strategy: Any, source: str, stage: int, folder: Path) -> Row:
    """From a directory, from a file that Fabric has written under DDP, and from a directory that was made a file."""

    def rank_main(rank: int) -> None:
        with quiet():
            fabric = launched(strategy)
            model, optimizer = saved(fabric, folder / "last")
            expected = train(fabric, model, optimizer, range(3, 6)), values(model)
            name = "last"
            if source == "consolidated":
                name = "whole.ckpt"
                if rank == 0:
                    consolidate_checkpoint(folder / "last", folder / name)
                fabric.barrier()
            fabric, model, optimizer, state, rest = resumed(folder, stage, name)
            assert (state["step"], state["scheduler"].last_epoch, rest["note"]) == (3, 7, "x")
            assert torch.equal(state["best"], torch.arange(3.0))
            assert torch.equal(state["teacher"].weight, torch.full((2, 2), 5.0))
            assert source != "directory" or rest.keys() == {"note"}
            found = train(fabric, model, optimizer, range(3, 6)), values(model)
            assert_same([{"ddp": {"all": expected}, "resumed": {"all": found}}], ["resumed"])

    yield rank_main


def test_another_number_of_ranks_loads_it(tmp_path: Path) -> None:
    def save(rank: int) -> dict[str, Any]:
        with quiet():
            model, _ = saved(launched(zero(3)), tmp_path / "last")
            return {"weights": values(model), "state": full_optimizer_state(model, "head.weight", "exp_avg_sq")}

    def load(rank: int) -> dict[str, Any]:
        with quiet():
            _, model, *_ = resumed(tmp_path, 3, world_size=3)
            return {"weights": values(model), "state": full_optimizer_state(model, "head.weight", "exp_avg_sq")}

    expected = run_world(2, save)[0]
    assert_same([{"ddp": expected, "loaded": found} for found in run_world(3, load)], ["loaded"])
    stored = load_full_state_dict(tmp_path / "last")
    assert_same([{"ddp": expected["weights"], "read": stored}], ["read"])
    consolidate_checkpoint(tmp_path / "last", tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    assert_same([{"ddp": expected["weights"], "read": whole["state_dict"]}], ["read"])


def checkpoints_of_a_trainer_and_of_fabric(tmp_path: Path) -> Row:
    """Fabric goes on from a Trainer's; a Trainer begins with Fabric's weights, and does not take it for a run."""

    def rank_main(rank: int) -> None:
        with quiet():
            module, name = Net(), "model.head.weight"
            trainer = make_trainer(ZeroStrategy(stage=3, units=["Block"]), max_epochs=1)
            trainer.fit(module, batches(3))
            trainer.save_checkpoint(tmp_path / "trainer")
            expected = values(module), full_optimizer_state(module, name, "exp_avg")

            fabric, other, teacher = launched(zero(2, units=["Block"])), Net(), nn.Linear(1, 1)
            model, optimizer = fabric.setup(other, other.configure_optimizers())
            with pytest.raises(ValueError, match="the states of 1 optimizers, and `state` has 2"):
                fabric.load(tmp_path / "trainer", {"net": model, "adam": optimizer, "again": optimizer})
            wanted = {"teacher": teacher, "net": model, "adam": optimizer}
            rest = fabric.load(tmp_path / "trainer", wanted, strict=False)
            assert (rest["global_step"], "optimizer_states" in rest) == (3, False)
            found = values(model), full_optimizer_state(model, name, "exp_avg")
            assert_same([{"ddp": {"all": expected}, "fabric": {"all": found}}], ["fabric"])
            assert fabric.load(tmp_path / "trainer", {"net": model})["optimizer_states"]
            fabric.save(tmp_path / "fabric", {"net": model, "adam": optimizer})
            fresh, policy = Net(), CheckpointPolicy(initial_weights=str(tmp_path / "fabric"))
            begun = make_trainer(ZeroStrategy(stage=3, units=["Block"], checkpoint=policy), max_epochs=1)
            begun.validate(fresh, batches(1), verbose=False)
            assert_same([{"ddp": expected[0], "begun": values(fresh)}], ["begun"])
            with pytest.raises(Exception, match="was not saved by a Trainer"):
                make_trainer(ZeroStrategy(stage=3)).fit(Net(), batches(1), ckpt_path=tmp_path / "fabric")

    yield rank_main


def raw_weights_filters_and_initial_weights(tmp_path: Path) -> Row:
    torch.save(built("convolutional").state_dict(), tmp_path / "raw.pt")

    def rank_main(rank: int) -> None:
        fabric, module = launched(zero(3)), MODELS["convolutional"]()
        model = fabric.setup_module(module)
        fabric.load_raw(tmp_path / "raw.pt", model)
        expected = dict(built("convolutional").state_dict())
        assert_same([{"ddp": expected, "raw": values(model)}], ["raw"])
        fabric.save(tmp_path / "heads", {"model": model}, filter={"model": lambda name, _: name.startswith("head")})
        found = fabric.load(tmp_path / "heads")
        assert found["model"].keys() == {"head.weight", "head.bias"}
        assert torch.equal(found["model"]["head.bias"].read(), expected["head.bias"])
        plain = MODELS["convolutional"]()
        fabric.load_raw(tmp_path / "raw.pt", plain)
        assert_same([{"ddp": expected, "raw": dict(plain.state_dict())}], ["raw"])
        policy = CheckpointPolicy(initial_weights=str(tmp_path / "raw.pt"))
        begun = launched(zero(2, checkpoint=policy)).setup_module(MODELS["convolutional"]())
        assert_same([{"ddp": expected, "begun": values(begun)}], ["begun"])

    yield rank_main


def frozen_weights_are_left_out_and_a_save_goes_on_in_the_background(tmp_path: Path) -> Row:
    def rank_main(rank: int) -> None:
        policy = CheckpointPolicy(exclude_frozen=True, async_save=True)
        fabric, module = launched(zero(3, checkpoint=policy)), built("convolutional")
        module.head.requires_grad_(False)
        model = fabric.setup_module(module)
        before = values(model)
        fabric.save(tmp_path / "part", {"model": model})
        with full_parameters(model), torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)
        fabric.strategy.session.checkpoints.wait()
        with pytest.warns(UserWarning, match="saved without its frozen parameters: 2 keep") if rank == 0 else quiet():
            fabric.load(tmp_path / "part", {"model": model})
        expected = {name: value + name.startswith("head.") for name, value in before.items()}
        assert_same([{"ddp": expected, "loaded": values(model)}], ["loaded"])

    yield rank_main


def test_checkpoints(tmp_path: Path) -> None:
    in_one_world(
        2,
        a_resumed_run_goes_on_as_if_nothing_had_been(zero(1), "directory", 2, tmp_path / "first"),
        a_resumed_run_goes_on_as_if_nothing_had_been(zero(3), "directory", 1, tmp_path / "third"),
        a_resumed_run_goes_on_as_if_nothing_had_been(DDPStrategy(), "DDP's file", 3, tmp_path / "ddp"),
        a_resumed_run_goes_on_as_if_nothing_had_been(zero(1), "consolidated", 3, tmp_path / "file"),
        checkpoints_of_a_trainer_and_of_fabric(tmp_path / "both"),
        raw_weights_filters_and_initial_weights(tmp_path),
        frozen_weights_are_left_out_and_a_save_goes_on_in_the_background(tmp_path / "frozen"),
    )


# ------------------------------------------------------------------------------------------------------------ errors


def test_what_cannot_work_is_an_error(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        fabric, module, stranger = launched(zero(3), 1), built(), nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match=r"from `fabric\.setup\(model, optimizer\)` on"):
            fabric.setup_optimizers(OPTIMIZERS["SGD"](module.parameters()))
        with pytest.raises(RuntimeError, match="The strategy is not set up in this process"):
            fabric.save(tmp_path / "early", {"step": 1})
        model = fabric.setup_module(module)
        foreign = OPTIMIZERS["SGD"](stranger.parameters())
        with pytest.raises(ValueError, match="parameter"):
            fabric.setup_optimizers(foreign)
        with pytest.raises(ValueError, match="shards one module, and Sequential is set up already"):
            fabric.setup_module(stranger)
        loss = model(data(0, 0)[0]).sum()
        with pytest.raises(RuntimeError, match=r"call `fabric\.backward\(loss\)`"):
            loss.backward()
        fabric.backward(model(data(0, 0)[0]).sum())
        with pytest.raises(ValueError, match=r"SGD is not an optimizer of this run\. .* In Fabric use"):
            fabric.clip_gradients(model, foreign, max_norm=1.0)
        with pytest.raises(ValueError, match=r"SGD is not an optimizer of this run\. .* In Fabric use"):
            fabric.save(tmp_path / "foreign", {"model": model, "optimizer": foreign})
        for state in ({"model": model, "again": model}, {"model": model, "state_dict": 1}):
            with pytest.raises(ValueError, match="must have the model once"):
                fabric.save(tmp_path / "twice", state)
        fabric.save(tmp_path / "saved", {"model": model})
        with pytest.raises(KeyError, match="optimizer"):
            fabric.load(tmp_path / "saved", {"model": model, "optimizer": foreign})
        optimizer = fabric.setup_optimizers(OPTIMIZERS["SGD"](model.parameters()))
        with pytest.raises(ValueError, match=r"fabric\.load\(path, \{'optimizer': optimizer\}\)"):
            fabric.load_raw(tmp_path / "saved", optimizer)
        fabric.backward(model(data(0, 0)[0]).sum() * float("nan"))
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)

    run_world(1, rank_main)


def another_strategy_does_not_get_the_gradients() -> Row:
    def rank_main(rank: int) -> None:
        module = built()
        for _ in range(2):  # this one may have it again
            fabric = launched(zero(1))
            model, optimizer = fabric.setup(module, OPTIMIZERS["SGD"](module.parameters()))
            before = values(module)
            train(fabric, model, optimizer, range(1))
            assert not torch.equal(before["0.weight"], values(module)["0.weight"])
        other = launched(DDPStrategy())
        model, optimizer = other.setup(module, OPTIMIZERS["SGD"](module.parameters()))
        with pytest.raises(ParameterAccessError, match="another strategy would train nothing"):
            other.backward(model(data(0, rank)[0]).sum())

    yield rank_main


def test_settings_that_are_refused() -> None:
    with pytest.raises(TypeError, match="loaders"):
        ZeroFabricStrategy(loaders=None)
    with pytest.raises(ValueError, match="stage"):
        ZeroFabricStrategy(stage=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_mib"):
        ZeroFabricStrategy(bucket_mib=-1)
    with pytest.raises(ValueError, match="takes no checkpoint plugin, got TorchCheckpointIO"):
        Fabric(accelerator="cpu", strategy="zero2", plugins=TorchCheckpointIO())
    with pytest.raises(ValueError, match=r"Fabric takes lightning_zero\.ZeroFabricStrategy"):
        Fabric(accelerator="cpu", strategy=ZeroStrategy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a Trainer takes lightning_zero\.ZeroStrategy"):
        Trainer(accelerator="cpu", strategy=ZeroFabricStrategy())  # type: ignore[arg-type]


def test_short_names() -> None:
    for name in ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload"):
        assert name in STRATEGY_REGISTRY.available_strategies()
        strategy = Fabric(accelerator="cpu", devices=1, strategy=name).strategy
        assert isinstance(strategy, ZeroFabricStrategy)
        assert strategy.settings.placement == ZeroStrategy(stage=int(name[4])).placement  # type: ignore[arg-type]
        assert (strategy.settings.offload is not None) == name.endswith("_offload")
    precision = ZeroPrecision("bf16-mixed", reduce_dtype="bfloat16")
    assert Fabric(accelerator="cpu", strategy="zero2", plugins=precision).strategy.precision is precision
