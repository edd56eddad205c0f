"""Modules: buffers, structure, hooks, modes, random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.thorough.fuzz.vocabulary import ANY, BEFORE_TRAINING, BETWEEN, Context, action

HAS_BUFFERS = ("convolution", "queue")
TIMES = (*BETWEEN, "before_forward", "after_forward")
EARLY = ("configure_optimizers", *BEFORE_TRAINING, "on_train_epoch_start", "on_train_batch_start", "before_forward")


# --------------------------------------------------------------------------------------------------------- buffers


@action(ANY, works="123", reads=True)
def read_buffers(c: Context) -> Any:
    """All buffers as this rank has them."""
    return {name: buffer.clone() for name, buffer in c.model.named_buffers()}


@action(TIMES, works="123", models=HAS_BUFFERS)
def write_own_buffer(c: Context) -> Any:
    """A buffer changed in place, differently on each rank: the first rank's counts from the next forward on."""
    module, name = c.buffer
    getattr(module, name).add_(0.5 + c.rank)


@action(TIMES, works="123", models=HAS_BUFFERS)
def replace_buffer(c: Context) -> Any:
    """A new tensor in a buffer's place, alike on all ranks."""
    module, name = c.buffer
    setattr(module, name, getattr(module, name) * 0.5)


@action(TIMES, models=HAS_BUFFERS)
def replace_own_buffer(c: Context) -> Any:
    """A new tensor in a buffer's place, another one on each rank."""
    module, name = c.buffer
    setattr(module, name, getattr(module, name) + c.rank)


@action(TIMES, works="123")
def register_new_buffer(c: Context) -> Any:
    """A buffer that was not there at the beginning, which moves from then on."""
    if c.call == 0:
        c.layer.register_buffer("steps", torch.zeros(2))
    c.layer.steps += 1
    return c.layer.steps.clone()


@action(TIMES, works="123", models=("convolution",))
def reset_statistics(c: Context) -> Any:
    """Batch norm's statistics from scratch."""
    c.model.bn.reset_running_stats()


@action(("on_train_start", "on_train_epoch_start", "on_train_batch_end"), works="123", models=("convolution",))
def recompute_statistics(c: Context) -> Any:
    """Batch norm's statistics from other data than those of training, different on each rank."""
    with torch.no_grad():
        dtype = c.layer.weight.dtype
        c.model.bn(torch.randn(4, 3, 8, generator=c.generator(per_rank=True)).to(dtype))
    return c.model.bn.running_mean.clone()


# ------------------------------------------------------------------------------------------------------- structure


@action(TIMES)
def add_module(c: Context) -> Any:
    """A new layer that nobody calls."""
    c.model.extra = nn.Linear(2, 2)
    return len(list(c.model.parameters()))


@action(TIMES)
def add_module_and_train_it(c: Context) -> Any:
    """A new layer behind an old one, in the optimizer."""
    if c.call == 0:
        torch.manual_seed(3)
        extra = nn.Linear(c.layer.out_features, c.layer.out_features).to(c.layer.weight.dtype)
        c.layer.extra = extra
        c.layer.register_forward_hook(lambda m, args, out: out + 0.1 * m.extra(out))
        if c.trainer.optimizers:
            c.optimizer.add_param_group({"params": list(extra.parameters())})


@action(TIMES)
def replace_module(c: Context) -> Any:
    """A new layer in an old one's place."""
    torch.manual_seed(4)
    block = c.a_block
    block.up = nn.Linear(block.up.in_features, block.up.out_features).to(block.up.weight.dtype)


@action(TIMES, works="123")
def remember_on_module(c: Context) -> Any:
    """Plain attributes on modules and parameters, as tags for an optimizer."""
    c.p.no_decay = c.call
    c.layer.note = "seen"
    return c.p.no_decay, c.layer.note


# ----------------------------------------------------------------------------------------------- hooks, modes, numbers


@action(EARLY, works="123")
def forward_hook_of_layer(c: Context) -> Any:
    """A forward hook that changes what comes out."""
    if c.call == 0:
        c.layer.register_forward_hook(lambda m, args, out: 0.9 * out)


@action(EARLY, works="12", reads=True)
def forward_hook_that_reads_the_weight(c: Context) -> Any:
    """A forward hook that logs the size of the layer's weight."""
    seen = c.kept.setdefault("seen", [])
    if c.call == 0:
        c.layer.register_forward_hook(lambda m, args, out: seen.append(m.weight.detach().norm().item()))
    return list(seen)


@action(EARLY, works="12")
def forward_pre_hook_that_scales_the_weight(c: Context) -> Any:
    """A forward pre-hook that normalises the weight, as spectral norm of old did."""

    def scale(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            module.weight.data.mul_(0.95)

    if c.call == 0:
        c.layer.register_forward_pre_hook(scale)


@action((*BETWEEN, "configure_optimizers", "before_forward", "after_forward"), works="123", reads=True)
def draw_numbers(c: Context) -> Any:
    """The global random state is where it is under DDP."""
    return torch.rand(3)


@action((*BETWEEN, "before_forward"), works="123")
def seed_again(c: Context) -> Any:
    """The user's own seed, different on each rank."""
    torch.manual_seed(17 + c.call + 100 * c.rank)


@action(("before_forward", "on_train_batch_start"), works="123")
def leave_a_block_out(c: Context) -> Any:
    """Stochastic depth: every other rank does without a block from now on, then the others."""
    c.a_block.skip = (c.call + c.rank) % 2 == 1


@action(ANY, works="123", reads=True)
def look_at_trainer(c: Context) -> Any:
    """Where training stands."""
    t = c.trainer
    return [t.global_step, t.current_epoch, t.global_rank, t.world_size, c.module.training, t.num_training_batches]


@action(("before_forward", "after_forward", "validation_step", "on_train_epoch_end", "on_train_batch_end"), works="123")
def log_own_number(c: Context) -> Any:
    """A metric of the rank's own, averaged over ranks."""
    c.module.log(f"own_{c.hook}", float(c.rank + c.call), sync_dist=True, on_step=False, on_epoch=True)
