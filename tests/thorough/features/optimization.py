"""Optimization, automatic and manual; precision; models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import full_gradients
from tests.helpers.cases import WIDTH, Stack
from tests.helpers.runs import Net, batches, made
from tests.helpers.training import make_trainer
from tests.thorough.features.feature import Feature, Refusal
from tests.thorough.features.loops import fitting

__all__ = ["FEATURES"]

Make = Callable[[], Strategy]


def optimizing(optimizer: Callable[[Any], Any]) -> Callable[[], Net]:
    """A module with this optimizer, of its named parameters."""

    class Optimized(Net):
        def configure_optimizers(self) -> Any:
            return optimizer(self)

    return Optimized


def _plateau(module: Net) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def _steps(module: Net) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2, "name": "rate"}]


class OwnScheduler(Net):
    """A scheduler of a kind that torch does not know, stepped by an overridden hook."""

    def configure_optimizers(self) -> Any:
        class Half:
            def __init__(self, optimizer: Any) -> None:
                self.optimizer, self.count = optimizer, 0

            def step(self, epoch: int) -> None:
                self.count += 1
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.5

            def state_dict(self) -> dict[str, Any]:
                return {"count": self.count}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.count = state["count"]

        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        return [optimizer], [Half(optimizer)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.01 * (1 + self.current_epoch), gradient_clip_algorithm="value"
        )


class Editing(Net):
    """Looks at gradients and edits them in hooks."""

    def __init__(self, whole: bool = True) -> None:
        super().__init__()
        self.whole = whole

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with full_gradients(self) if self.whole else nullcontext():
            self.losses += list(grad_norm(self, 2).values())
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class OwnStep(Net):
    """Warms up in ``optimizer_step``, scales in ``backward``, frees in ``optimizer_zero_grad``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 2:
            optimizer_closure()  # a batch without a step
            return
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.trainer.global_step)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Pair(Net):
    """Generator and discriminator, each with its optimizer and scheduler, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = Stack()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.model.parameters(), lr=0.01, eps=1e-4)
        second = torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, y = self.data(batch_idx)
        for optimizer, sign in ((second, 1.0), (first, -1.0)):
            if optimizer is first and batch_idx % 2:
                continue
            self.toggle_optimizer(optimizer)
            loss = F.mse_loss(self.judge(self.model(x)), y) * sign
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class ByHand(Net):
    """Accumulates by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Sharpness(torch.optim.SGD):
    """Steps uphill, looks again, and steps down from where it was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        moved = [(p, p.grad.clone()) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, uphill in moved:
            parameter.add_(uphill, alpha=0.05)
        with torch.enable_grad():
            closure()
        for parameter, uphill in moved:
            parameter.sub_(uphill, alpha=0.05)
        super().step()
        return loss


class Centred(torch.optim.SGD):
    """Takes the mean of each row off gradients of matrices, where torch collects what it is about to step on."""

    def _init_group(self, group: Any, params: Any, grads: Any, *lists: Any) -> Any:
        found = super()._init_group(group, params, grads, *lists)
        for gradient in grads:
            if gradient.dim() > 1:
                gradient.sub_(gradient.mean(dim=1, keepdim=True))
        return found


class Penalty(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        x.requires_grad_()
        loss = F.mse_loss(self(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0] = torch.jit.trace(self.model.layers[0], torch.zeros(1, WIDTH))  # type: ignore[no-untyped-call]


class Normalised(Net):
    """Batch norm over all ranks."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Stack(), nn.BatchNorm1d(WIDTH)))


class Rows(Net):
    """Scales rows of its embedding as they are looked up."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Embedding(8, WIDTH, max_norm=1.0), Stack()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(torch.tensor([batch_idx, 2])).square().mean()


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH)))


class Made(Net):
    """Its layers are made, and their shapes found, in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self, "more"):
            torch.manual_seed(2)
            self.more = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))
            self.more(torch.zeros(1, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        return F.mse_loss(self.more(self.model(x)), y)


class Silent(Net):
    """Without ``self.log``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        return F.mse_loss(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(*self.data(batch_idx))


def compiled(make: Make, folder: Path) -> Any:
    """Twice, and saved in between."""
    module, trainer = torch.compile(Silent(), backend="eager"), make_trainer(make())
    trainer.fit(module, batches(2), batches(1))  # type: ignore[arg-type]
    trainer.save_checkpoint(folder / "saved.ckpt")
    trainer.validate(module, batches(1))  # type: ignore[arg-type]
    module, trainer = Silent(), make_trainer(make(), max_epochs=2)
    trainer.fit(torch.compile(module, backend="eager"), batches(2), ckpt_path=folder / "saved.ckpt")  # type: ignore[arg-type]
    return made(module, trainer)


class Compiling(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.model.layers:
            layer.compile(backend="eager")


def steps_of_one(make: Make, folder: Path) -> Any:
    """``max_steps`` counts the steps of all optimizers."""
    module, trainer = Pair(), make_trainer(make(), max_epochs=-1, max_steps=7)
    trainer.fit(module, batches(4))
    assert trainer.global_step >= 7
    return made(module, trainer)


_EVERYWHERE = (1, 2, 3)
BY_NORM: Any = {"bounds": dict.fromkeys(_EVERYWHERE, 1e-5), "why": "rounding: norms are summed over the ranks"}
BY_SUM: Any = {
    "bounds": {2: 1e-5, 3: 1e-5},
    "why": "rounding: each micro-step is averaged, where DDP averages their sum",
}
_NORM = Refusal("with max_norm=1.0, which changes", "with several ranks, which drift apart under DDP")

FEATURES = {
    "Automatic optimization": [
        Feature("`ReduceLROnPlateau`", fitting(3, 1, net=optimizing(_plateau), max_epochs=4)),
        Feature("schedulers by step, with frequency", fitting(4, net=optimizing(_steps), max_epochs=2)),
        Feature("`lr_scheduler_step`, a scheduler of one's own", fitting(2, net=OwnScheduler, max_epochs=3)),
        Feature("`gradient_clip_val` by norm", fitting(4, gradient_clip_val=0.01), **BY_NORM),
        Feature("`gradient_clip_val` by value", fitting(4, gradient_clip_val=0.01, gradient_clip_algorithm="value")),
        Feature(
            "`grad_norm`, `clip_grad_norm_`, edits of `.grad` in hooks, inside `full_gradients`",
            fitting(3, net=Editing),
        ),
        Feature(
            "`grad_norm`, `clip_grad_norm_` in hooks, without `full_gradients`",
            fitting(3, net=lambda: Editing(False)),
            **BY_NORM,
        ),
        Feature("`configure_gradient_clipping`", fitting(3, net=OwnClipping, max_epochs=2)),
        Feature(
            "`optimizer_step`, `backward`, `optimizer_zero_grad` overridden",
            fitting(4, net=OwnStep, max_epochs=2),
            **BY_SUM,
        ),
        Feature("`accumulate_grad_batches`", fitting(5, accumulate_grad_batches=2, max_epochs=2), **BY_SUM),
        Feature("no optimizer", fitting(3, net=optimizing(lambda module: None))),
        Feature(
            "`LBFGS`",
            fitting(2, net=optimizing(lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3))),
        ),
        Feature(
            "an optimizer with a closure, as SAM",
            fitting(3, net=optimizing(lambda module: Sharpness(module.parameters(), lr=0.1, momentum=0.9))),
        ),
        Feature(
            "an optimizer derived from torch's that changes gradients in its step",
            fitting(3, net=optimizing(lambda module: Centred(module.parameters(), lr=0.1, momentum=0.9))),
        ),
        Feature(
            "`fused` and `foreach`",
            fitting(
                3,
                net=optimizing(lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4, foreach=True)),
            ),
        ),
    ],
    "Manual optimization": [
        Feature(
            "several optimizers, `toggle_optimizer`, `clip_gradients`, schedulers",
            fitting(4, net=Pair, max_epochs=2),
            **BY_NORM,
        ),
        Feature("`max_steps` with several optimizers", steps_of_one, **BY_NORM),
        Feature("accumulation with `toggle_model(sync_grad=...)`", fitting(4, net=ByHand), **BY_SUM),
    ],
    "Precision and models": [
        Feature("`bf16-true`", fitting(4, precision="bf16-true")),
        Feature("`64-true`", fitting(4, precision="64-true")),
        Feature("lazy layers, materialised in `configure_model`", fitting(3, net=Made)),
        Feature(
            "layers that are still lazy",
            fitting(3, net=Lazy),
            ddp_refuses=True,
            refused=dict.fromkeys(
                _EVERYWHERE,
                Refusal("configure_model", "under DDP too: materialise them in `__init__` or `configure_model`"),
            ),
        ),
        Feature("`layer.compile()`", fitting(3, net=Compiling)),
        Feature(
            "`torch.compile` of the whole `LightningModule`",
            compiled,
            why="in torch 2.13 `self.log` in it fails under any strategy",
        ),
        Feature(
            "`sync_batchnorm`",
            fitting(3, net=Normalised, sync_batchnorm=True),
            ddp_refuses=True,
            refused=dict.fromkeys(
                _EVERYWHERE,
                Refusal("SyncBatchNorm expected input", "on CPUs, by torch, under DDP too; on GPUs not tried"),
            ),
        ),
        Feature(
            "traced submodules (TorchScript)",
            fitting(3, net=Scripted),
            refused={3: Refusal("is a TorchScript module", "compiled code reads parameters past what gathers them")},
            alone=True,
        ),
        Feature("gradients of gradients (`create_graph=True`)", fitting(3, net=Penalty)),
        Feature(
            "`nn.Embedding(max_norm=...)`", fitting(3, net=Rows), refused=dict.fromkeys(_EVERYWHERE, _NORM), alone=True
        ),
    ],
}
