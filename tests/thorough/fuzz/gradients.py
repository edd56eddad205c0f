"""Gradients: edits between backward and step, hooks of tensors, freezing and thawing, backward by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from tests.thorough.fuzz.vocabulary import AFTER_BACKWARD, ANY, BEFORE_TRAINING, BETWEEN, Context, action

EARLY = ("configure_optimizers", *BEFORE_TRAINING, "on_train_epoch_start", "on_train_batch_start")


# ------------------------------------------------------------------------------------------- edits of what was reduced


@action(AFTER_BACKWARD, gradients=True)
def zero_rows_of_gradient(c: Context) -> Any:
    """No update for some rows, as for tokens that are not trained."""
    if c.p.grad is None:
        return "none"
    if c.p.grad.ndim:
        c.p.grad[:2] = 0.0
    else:
        c.p.grad.zero_()


@action(AFTER_BACKWARD, gradients=True)
def mask_gradient(c: Context) -> Any:
    """A mask of the gradient's shape."""
    if c.p.grad is not None:
        c.p.grad.mul_((c.like(c.p) > 0).to(c.p.dtype))


@action(AFTER_BACKWARD, works="123", gradients=True)
def scale_all_gradients(c: Context) -> Any:
    """A number for all of them."""
    for p in c.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@action(AFTER_BACKWARD, gradients=True)
def scale_gradients_at_once(c: Context) -> Any:
    """One call for all of them."""
    torch._foreach_mul_([p.grad for p in c.model.parameters() if p.grad is not None], 0.5)


@action(AFTER_BACKWARD, works="123", gradients=True)
def no_gradient(c: Context) -> Any:
    """``p.grad = None``: the optimizer leaves this one out."""
    c.p.grad = None


@action(AFTER_BACKWARD, gradients=True)
def assign_gradient(c: Context) -> Any:
    """A gradient of one's own."""
    c.p.grad = c.like(c.p)


@action(AFTER_BACKWARD, works="123", gradients=True)
def clamp_gradient(c: Context) -> Any:
    """Clipping by value, by hand."""
    if c.p.grad is not None:
        c.p.grad.clamp_(-0.01, 0.01)


@action(AFTER_BACKWARD, gradients=True)
def add_noise_to_gradient(c: Context) -> Any:
    """Gradient noise, the same on every rank."""
    if c.p.grad is not None:
        c.p.grad.add_(c.like(c.p))


@action(AFTER_BACKWARD, gradients=True)
def add_own_noise_to_gradient(c: Context) -> Any:
    """Gradient noise that differs between ranks."""
    if c.p.grad is not None:
        c.p.grad.add_(c.like(c.p, per_rank=True))


@action(AFTER_BACKWARD, works="123", bound=1e-5, gradients=True, rounds=True)
def normalise_gradient(c: Context) -> Any:
    """Divided by its own norm."""
    if c.p.grad is not None:
        c.p.grad.div_(c.p.grad.norm() + 1e-3)


@action(AFTER_BACKWARD, works="123", bound=1e-5, gradients=True, rounds=True)
def clip_norm_by_hand(c: Context) -> Any:
    """``clip_grad_norm_``."""
    return torch.nn.utils.clip_grad_norm_(c.model.parameters(), 0.05).item()


@action(AFTER_BACKWARD, works="123", gradients=True)
def clip_value_by_hand(c: Context) -> Any:
    """``clip_grad_value_``."""
    torch.nn.utils.clip_grad_value_(c.model.parameters(), 0.01)


@action(AFTER_BACKWARD, gradients=True)
def keep_gradients_for_later(c: Context) -> Any:
    """Gradients added up over steps by the user, put back as gradients."""
    if c.p.grad is not None:
        kept = c.kept.setdefault("sum", torch.zeros_like(c.p))
        kept.add_(c.p.grad)
        c.p.grad.copy_(kept)


@action(AFTER_BACKWARD, works="123", gradients=True)
def edit_in_full_gradients(c: Context) -> Any:
    """The documented way."""
    if not hasattr(lightning_zero, "full_gradients"):
        raise lightning_zero.errors.ParameterAccessError("`full_gradients` is not there yet")
    with lightning_zero.full_gradients(c.module):
        if c.p.grad is None:
            return None
        norm = c.p.grad.norm()
        c.p.grad.div_(norm + 1e-3)
        return norm.item()


@action((*BETWEEN[1:], *AFTER_BACKWARD), works="123")
def zero_grad_of_optimizer(c: Context) -> Any:
    """``optimizer.zero_grad()`` at any time."""
    c.optimizer.zero_grad()


@action((*BETWEEN[1:], *AFTER_BACKWARD), works="123")
def zero_grad_to_zero(c: Context) -> Any:
    """Zeros instead of none: momentum and decay go on."""
    c.optimizer.zero_grad(set_to_none=False)


@action(("on_train_batch_end", "on_before_zero_grad", "on_train_batch_start"))
def gradient_before_the_step(c: Context) -> Any:
    """A gradient assigned where none should be, which backward then adds to, or which is cleared."""
    c.p.grad = c.like(c.p)


# -------------------------------------------------------------------------------------- hooks on what is still local


@action(EARLY, works="123")
def tensor_hook_masks_rows(c: Context) -> Any:
    """The usual way to train some rows only."""

    def mask(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:1] = 0.0
        return grad

    if c.call == 0 and c.p.ndim:
        c.p.register_hook(mask)


@action(EARLY, works="123", reads=True)
def tensor_hook_reads(c: Context) -> Any:
    """A log of local gradient norms."""
    seen = c.kept.setdefault("seen", [])
    if c.call == 0:
        c.p.register_hook(lambda grad: seen.append(grad.norm().item()))
    return list(seen)


@action(EARLY, works="123")
def tensor_hook_on_one_rank(c: Context) -> Any:
    """A hook that only one rank has: gradients are averaged after it, so that it is allowed."""
    if c.call == 0 and c.rank == 1:
        c.p.register_hook(lambda grad: 3 * grad)


@action(EARLY, works="123")
def hook_after_accumulation_scales(c: Context) -> Any:
    """``register_post_accumulate_grad_hook`` that changes the gradient, but not one that nobody clears."""
    name = c.name

    def scale(p: Tensor) -> None:
        if name != c.module.left_out and p.grad is not None:
            p.grad.mul_(0.5)

    if c.call == 0:
        c.p.register_post_accumulate_grad_hook(scale)


@action((*EARLY, "before_forward"), works="123")
def backward_hook_of_layer(c: Context) -> Any:
    """A full backward hook that scales what goes on to the inputs."""
    if c.call == 0:
        c.layer.register_full_backward_hook(
            lambda m, grad_in, grad_out: tuple(None if g is None else 2 * g for g in grad_in)
        )


# --------------------------------------------------------------------------------------------- what is trained at all


@action((*BETWEEN, "configure_optimizers", "before_forward"))
def freeze_layer(c: Context) -> Any:
    """A layer that is no longer trained."""
    c.layer.requires_grad_(False)


@action((*BETWEEN, "before_forward"))
def freeze_and_thaw_in_turn(c: Context) -> Any:
    """Alternating training: off, on, off."""
    c.layer.requires_grad_(c.call % 2 == 1)


@action((*BETWEEN, "before_forward"), alone=True)
def freeze_on_one_rank(c: Context) -> Any:
    """A mistake."""
    if c.rank == 1:
        c.layer.requires_grad_(False)


def thawed(c: Context, p: nn.Parameter) -> None:
    """DDP averages nothing of what was frozen when it wrapped the module: here a hook does so in its place."""
    if isinstance(c.trainer.strategy.model, DistributedDataParallel) and not p.requires_grad:

        def averaged(gradient: Tensor) -> Tensor:
            gradient = gradient / dist.get_world_size()
            dist.all_reduce(gradient)
            return gradient

        p.requires_grad_(True).register_hook(averaged)
    p.requires_grad_(True)


@action((*BETWEEN, "configure_optimizers", "before_forward"), models=("frozen", "momentum"))
def thaw_one(c: Context) -> Any:
    """One parameter that was frozen, and a group for it."""
    names = c.kept.setdefault("frozen", [n for n, p in c.model.named_parameters() if not p.requires_grad])
    p = c.model.get_parameter(names[c.pick % len(names)])
    thawed(c, p)
    if c.call == 0 and c.hook != "configure_optimizers":
        c.optimizer.add_param_group({"params": [p]})


@action(ANY, works="123", reads=True)
def set_trained_to_what_it_is(c: Context) -> Any:
    """``requires_grad_`` that changes nothing."""
    for p in c.model.parameters():
        p.requires_grad_(p.requires_grad)


# ------------------------------------------------------------------------------------------------- more backwards


@action(("after_forward",), works="123", reads=True)
def gradient_by_autograd(c: Context) -> Any:
    """``torch.autograd.grad`` of the loss, inside the step."""
    (grad,) = torch.autograd.grad(c.module.loss, [c.p], retain_graph=True, allow_unused=True)
    return None if grad is None else grad.norm().item()


@action(("after_forward",), works="123")
def gradient_penalty(c: Context) -> Any:
    """The norm of a weight's gradient as a part of the loss."""
    (grad,) = torch.autograd.grad(c.module.loss, [c.p], create_graph=True, allow_unused=True)
    if grad is not None:
        c.module.add_to_loss(0.1 * grad.square().sum())


@action(("after_forward",), works="123", manual=True)
def skip_step(c: Context) -> Any:
    """No backward and no step for this batch, on every rank."""
    c.module.skip = True


@action(("after_forward",), works="123")
def two_forwards(c: Context) -> Any:
    """A second forward in the same step that is a part of the loss."""
    c.module.add_to_loss(0.1 * c.model(c.module.x + 0.1).square().mean())


@action(("after_forward",), works="12")
def loss_without_the_model(c: Context) -> Any:
    """A loss that leaves all but one layer out."""
    inputs = torch.ones(2, c.layer.in_features, dtype=c.module.x.dtype)
    c.module.loss = c.layer(inputs).square().mean()


@action(("manual_gradients",), manual=True, rounds=True)
def second_backward(c: Context) -> Any:
    """A forward and a backward more before the step, so that gradients add up."""
    c.module.manual_backward(c.module.again())


@action(("after_forward",), manual=True, rounds=True)
def backward_twice(c: Context) -> Any:
    """``retain_graph=True``, and the same graph backwards once more."""
    c.module.twice = True


@action(("before_forward",), works="123", manual=True)
def toggle_optimizer(c: Context) -> Any:
    """``toggle_optimizer``: only what the optimizer has is trained, until the step is done."""
    c.module.toggle_optimizer(c.module.optimizers())
    c.module.toggled = True
