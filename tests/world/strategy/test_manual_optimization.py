"""Several optimizers and manual optimization, in the way Lightning's documentation writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero.errors import ParameterAccessError
from tests.helpers.cases import WIDTH, Block
from tests.helpers.rows import Row, compared, in_one_world
from tests.helpers.runs import Net, assert_same, fit, made, quiet, zero
from tests.helpers.world import run_world

# Rounding differences of 1e-7 in a gradient, carried through a few steps of AdamW.
ROUNDING = 1e-5


def _network(last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, last))


class Gan(Net):
    """The canonical example: toggle, loss, zero_grad, backward, step, untoggle; for each of the two optimizers."""

    def __init__(self, zero_grad_first: bool, toggles: bool) -> None:
        super().__init__(nn.Identity)
        self.automatic_optimization = False
        self.zero_grad_first, self.toggles = zero_grad_first, toggles
        torch.manual_seed(3)
        self.generator, self.discriminator = _network(WIDTH), _network(1)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial(self, y_hat: Tensor, real: bool) -> Tensor:
        return F.binary_cross_entropy_with_logits(y_hat, torch.full_like(y_hat, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, images = self.data(batch_idx)
        optimizer_g, optimizer_d = self.optimizers()

        if self.toggles:
            self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial(self.discriminator(self(z)), real=True)
        self.advance(optimizer_g, g_loss)
        if self.toggles:
            self.untoggle_optimizer(optimizer_g)

        if self.toggles:
            self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial(self.discriminator(images), real=True)
        fake_loss = self.adversarial(self.discriminator(self(z).detach()), real=False)
        d_loss = (real_loss + fake_loss) / 2
        if not self.toggles:
            optimizer_d.zero_grad()  # the generator's backward left gradients here
        self.advance(optimizer_d, d_loss)
        if self.toggles:
            self.untoggle_optimizer(optimizer_d)
        self.losses += [g_loss.detach().clone(), d_loss.detach().clone()]
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

    def advance(self, optimizer: Any, loss: Tensor) -> None:
        if self.zero_grad_first:
            optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if not self.zero_grad_first:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        options = {"lr": 0.01, "betas": (0.5, 0.999), "eps": 1e-4}
        optimizers = [torch.optim.Adam(net.parameters(), **options) for net in (self.generator, self.discriminator)]
        return optimizers, []

    def on_validation_epoch_end(self) -> None:
        self.log("sample", self(torch.ones(1, WIDTH)).mean())


def as_under_ddp(make: Callable[[], Net], exact: bool = True, steps: int | None = None, **options: Any) -> Row:
    """The module trains as under DDP: bit for bit, or with sums in another order."""

    def play(strategy: Strategy) -> dict[str, Any]:
        module = make()
        trainer = fit(strategy, module, **options)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return {**made(module, trainer), "rates": rates}

    results = yield compared(play)
    assert_same(results, bound=0.0 if exact else ROUNDING)
    assert steps is None or results[0]["stage 3"]["global_step"] == steps
    assert len(set(map(float, results[0]["stage 3"]["losses"]))) > 2, "nothing moves"


class OneFake(Gan):
    """As in PyTorch's own tutorial: both losses are of one forward of the generator, between which the other steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        z, images = self.data(batch_idx)
        optimizer_g, optimizer_d = self.optimizers()
        fake = self(z)
        real_loss = self.adversarial(self.discriminator(images), real=True)
        d_loss = real_loss + self.adversarial(self.discriminator(fake.detach()), real=False)
        self.advance(optimizer_d, d_loss)
        g_loss = self.adversarial(self.discriminator(fake), real=True)
        self.advance(optimizer_g, g_loss)
        self.losses += [g_loss.detach().clone(), d_loss.detach().clone()]


class Manual(Net):
    """``body(module, optimizer, batch_idx)`` is its training step."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = body

    def loss(self, batch_idx: int) -> Tensor:
        x, y = self.data(batch_idx)
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach().clone())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.body(self, self.optimizers(), batch_idx)


def twice(module: Manual, optimizer: Any, batch_idx: int) -> None:
    """DDP reduces each backward: (a1 + b1), then adds a2 on every rank before it reduces again. We add (a2 + b2)."""
    optimizer.zero_grad()
    for micro in range(2):
        module.manual_backward(module.loss(2 * batch_idx + micro) / 2)
    optimizer.step()


def every_other(module: Manual, optimizer: Any, batch_idx: int) -> None:
    module.manual_backward(module.loss(batch_idx) / 2)
    if batch_idx % 2:
        optimizer.step()
        optimizer.zero_grad()


def raw_step(module: Manual, optimizer: Any, batch_idx: int) -> None:
    """``use_pl_optimizer=False`` gives the user's own object; its ``step`` moves the weights that forwards use."""
    assert isinstance(optimizer, LightningOptimizer)
    raw = module.optimizers(use_pl_optimizer=False)
    assert type(raw) is torch.optim.AdamW
    raw.zero_grad()
    module.manual_backward(module.loss(batch_idx))
    raw.step()


def with_closure(module: Manual, optimizer: Any, batch_idx: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module.loss(batch_idx)
        module.manual_backward(loss)
        return loss

    optimizer.step(closure=closure)


class Turns(Manual):
    """Two optimizers of the same weights, one of which keeps them whole at one rank, take turns."""

    def __init__(self) -> None:
        super().__init__(self.turn)

    def turn(self, _: Any, optimizers: Any, batch_idx: int) -> None:
        optimizer = optimizers[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim == 2]
        return torch.optim.Muon(weights, lr=0.01), torch.optim.SGD(self.parameters(), lr=0.1)


def test_loops_by_hand_train_like_ddp() -> None:
    in_one_world(
        2,
        as_under_ddp(lambda: Gan(zero_grad_first=True, toggles=True), val=1, max_epochs=2, steps=16),
        as_under_ddp(lambda: Gan(zero_grad_first=False, toggles=False), val=1, max_epochs=2, steps=16),
        as_under_ddp(lambda: OneFake(zero_grad_first=True, toggles=False)),
        as_under_ddp(lambda: Manual(twice), exact=False),
        as_under_ddp(lambda: Manual(every_other), exact=False, count=6, steps=3),
        as_under_ddp(lambda: Manual(raw_step), steps=0),  # as in DDP: Lightning counts its own wrapper's steps only
        as_under_ddp(lambda: Manual(with_closure)),
        as_under_ddp(Turns),
    )


class Unsynced(Net):
    """Switches the average off as on DDP's wrapper."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.model.require_backward_grad_sync = False  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class Named(Net):
    """A module of the user's that has such names itself."""

    def __init__(self) -> None:
        super().__init__()
        self.no_sync = nn.Linear(2, 2)
        self.require_backward_grad_sync = "mine"


def test_the_average_cannot_be_switched_off_as_on_ddp_s_wrapper() -> None:
    def run(rank: int) -> None:
        with quiet(), pytest.raises(ParameterAccessError, match="`require_backward_grad_sync = False` on Unsynced"):
            fit(zero(3), Unsynced())
        module = Named()
        with quiet():
            fit(zero(3), module, 1)
        assert isinstance(module.no_sync, nn.Linear)
        assert module.require_backward_grad_sync == "mine"

    run_world(2, run)
