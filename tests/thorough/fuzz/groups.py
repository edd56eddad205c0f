"""Optimizers: hyperparameters, groups, states, steps; schedulers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.thorough.fuzz.vocabulary import AFTER_BACKWARD, BETWEEN, Context, action

# The optimizers exist from `on_fit_start` on.
TIMES = (*BETWEEN, "before_forward", "after_forward", "on_before_backward", *AFTER_BACKWARD)


def names_in(c: Context, group: dict[str, Any]) -> list[str]:
    """Which of the model's parameters are in a group; what is not the model's has no name."""
    names = {id(p): name for name, p in c.model.named_parameters()}
    return [names.get(id(p), "?") for p in group["params"]]


# ------------------------------------------------------------------------------------------------- hyperparameters


@action(TIMES, works="123")
def change_rate(c: Context) -> Any:
    """Another learning rate."""
    c.group["lr"] *= 0.5
    return c.group["lr"]


@action(TIMES, alone=True)
def change_rate_on_one_rank(c: Context) -> Any:
    """A mistake: ranks that learn at different rates."""
    if c.rank == 0:
        c.group["lr"] *= 0.5


@action(TIMES, works="123")
def warm_up_by_hand(c: Context) -> Any:
    """A schedule written in a hook."""
    for group in c.optimizer.param_groups:
        group["lr"] = 0.01 * (1 + c.trainer.global_step)


@action(("on_train_batch_end", "on_train_epoch_end", "on_validation_end"), works="123")
def step_scheduler_by_hand(c: Context) -> Any:
    """One more step of the schedule."""
    for config in c.trainer.lr_scheduler_configs:
        config.scheduler.step()
    return [group["lr"] for group in c.optimizer.param_groups]


# ---------------------------------------------------------------------------------------------------------- groups


@action(TIMES, reads=True)
def names_of_groups(c: Context) -> Any:
    """Which parameters are in which group, by identity."""
    return [names_in(c, group) for group in c.optimizer.param_groups]


@action(TIMES, reads=True)
def shapes_of_groups(c: Context) -> Any:
    """The shapes in a group."""
    return [[tuple(p.shape) for p in g["params"]] for g in c.optimizer.param_groups]


@action(TIMES)
def clamp_weights_of_groups(c: Context) -> Any:
    """Weights clamped where the optimizer has them."""
    with torch.no_grad():
        for p in c.group["params"]:
            p.clamp_(-0.1, 0.1)


@action(AFTER_BACKWARD, gradients=True)
def scale_gradients_of_groups(c: Context) -> Any:
    """Gradients changed where the optimizer has them."""
    for p in c.group["params"]:
        if p.grad is not None:
            p.grad.mul_(0.5)


@action(TIMES, works="123")
def add_group(c: Context) -> Any:
    """The parameter that ``configure_optimizers`` left out, from now on."""
    if c.call == 0 and c.module.left_out:
        c.optimizer.add_param_group({"params": [c.model.get_parameter(c.module.left_out)], "lr": 0.005})


@action(TIMES)
def add_group_of_new_parameter(c: Context) -> Any:
    """A parameter that is not the model's."""
    if c.call == 0:
        c.kept["own"] = nn.Parameter(torch.ones(3))
        c.optimizer.add_param_group({"params": [c.kept["own"]]})


@action(TIMES)
def move_between_groups(c: Context) -> Any:
    """A parameter from the first group to the last."""
    first, last = c.optimizer.param_groups[0], c.optimizer.param_groups[-1]
    if first is not last and len(first["params"]) > 1:
        last["params"].append(first["params"].pop())


@action(TIMES)
def remove_from_group(c: Context) -> Any:
    """A parameter that is no longer updated."""
    if len(c.group["params"]) > 1:
        c.group["params"].pop(0)


@action(TIMES)
def split_group(c: Context) -> Any:
    """A group cut in two by hand."""
    group = c.optimizer.param_groups[0]
    if len(group["params"]) > 1:
        half = len(group["params"]) // 2
        rest = {**group, "params": group["params"][half:], "lr": 0.5 * group["lr"]}
        group["params"] = group["params"][:half]
        c.optimizer.param_groups.append(rest)


# ---------------------------------------------------------------------------------------------------------- states


@action(TIMES, reads=True)
def keys_of_state(c: Context) -> Any:
    """What the state of a parameter of the model holds."""
    return sorted(c.optimizer.state[c.p]) if c.p in c.optimizer.state else "none"


@action(TIMES, reads=True)
def read_state_of_weight(c: Context) -> Any:
    """The state of one parameter, by the parameter."""
    found = c.optimizer.state.get(c.p, {})
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


@action(TIMES)
def clear_state(c: Context) -> Any:
    """The optimizer starts anew."""
    c.optimizer.state.clear()


@action(TIMES)
def forget_state_of_weight(c: Context) -> Any:
    """The state of one parameter forgotten."""
    c.optimizer.state.pop(c.p, None)


@action(TIMES)
def scale_all_states(c: Context) -> Any:
    """All momenta made smaller."""
    for state in c.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                value.mul_(0.5)


@action(TIMES)
def rewind_optimizer(c: Context) -> Any:
    """``load_state_dict`` of what ``state_dict`` gave at the first call."""
    if c.call == 0:
        c.kept["state"] = copy.deepcopy(c.optimizer.state_dict())
    else:
        c.optimizer.load_state_dict(c.kept["state"])


@action(TIMES, reads=True)
def state_dict_of_optimizer(c: Context) -> Any:
    """What ``optimizer.state_dict()`` holds."""
    return c.optimizer.state_dict()


# ----------------------------------------------------------------------------------------------------------- steps


@action(("on_fit_start", "on_train_start", "on_train_epoch_start"), works="123")
def hooks_of_optimizer(c: Context) -> Any:
    """Step hooks of the user: one that counts, one that changes the rate."""
    seen = c.kept.setdefault("seen", [])

    def slower(optimizer: Any, *args: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    if c.call == 0:
        c.optimizer.register_step_pre_hook(slower)
        c.optimizer.register_step_post_hook(lambda optimizer, *args: seen.append(optimizer.param_groups[0]["lr"]))
    return list(seen)


@action((*AFTER_BACKWARD, "on_train_batch_end", "on_before_zero_grad"))
def one_more_step(c: Context) -> Any:
    """``optimizer.step()`` by hand, besides the loop's own."""
    c.optimizer.step()


@action(("on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end"), ends=True)
def new_optimizer(c: Context) -> Any:
    """Another optimizer from here on."""
    if c.call == 0:
        trained = [p for p in c.model.parameters() if p.requires_grad]
        c.trainer.optimizers = [torch.optim.SGD(trained, lr=0.05)]


@action(("on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start"))
def own_optimizer_beside(c: Context) -> Any:
    """An optimizer that Lightning does not know, stepped with gradients of the user's own."""
    optimizer = c.kept.setdefault("own", torch.optim.SGD([c.p], lr=0.1))
    c.p.grad = c.like(c.p)
    optimizer.step()
    optimizer.zero_grad()
