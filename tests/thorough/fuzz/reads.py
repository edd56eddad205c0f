"""Reading: weights, states, copies, evaluation, generation, saving."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import Tensor
from torch.nn import functional as F

import lightning_zero
from tests.thorough.fuzz.vocabulary import AFTER_BACKWARD, ANY, BETWEEN, VALIDATION, Context, action

# Where a model may be called without disturbing a step that is under way.
CALLS = (*BETWEEN, "before_forward", "on_after_backward", "on_before_optimizer_step")


def sample(c: Context, rows: int = 3) -> Tensor:
    """An input, the same on every rank, without touching the global random state."""
    generator = torch.Generator().manual_seed(c.pick)
    dtype = torch.float64 if c.module.program.precision == "64-true" else torch.float32
    return torch.randn(rows, 8, generator=generator).to(dtype)


# ------------------------------------------------------------------------------------------------------ a value


@action(ANY, works="12", inside="123", reads=True, bound=1e-5)
def read_weight_norm(c: Context) -> Any:
    """The norm of a weight, as a number."""
    return c.p.norm().item()


@action(ANY, works="12", inside="123", reads=True)
def clone_weight(c: Context) -> Any:
    """A copy of a weight."""
    return c.p.detach().clone()


@action(ANY, works="12", inside="123", reads=True)
def weight_to_numpy(c: Context) -> Any:
    """A weight in numpy."""
    return float(c.p.detach().cpu().numpy().sum(dtype="float64"))


@action(ANY, works="12", inside="123", reads=True)
def weights_are_finite(c: Context) -> Any:
    """The guard that many write: stop when a weight is NaN."""
    module = c.model if c.block is None else c.block
    return [name for name, p in module.named_parameters() if not torch.isfinite(p).all()]


@action(ANY, works="12", reads=True)
def vector_of_parameters(c: Context) -> Any:
    """All weights in one vector."""
    return torch.nn.utils.parameters_to_vector(c.model.parameters()).detach().norm()


# -------------------------------------------------------------------------------------------- what needs no value


@action(ANY, works="123", inside="123", reads=True)
def zeros_like_weight(c: Context) -> Any:
    """``zeros_like`` and its kind: what a momentum or a mask begins with."""
    p = c.p
    return [torch.zeros_like(p), torch.ones_like(p), p.new_full(p.shape, 2.0), p.new_zeros(3)]


@action(ANY, works="123", inside="123", reads=True)
def look_at_weight(c: Context) -> Any:
    """Everything about a weight but its value."""
    p = c.p
    facts = [tuple(p.shape), p.size(), p.ndim, p.dim(), p.numel(), str(p.dtype), str(p.device), p.requires_grad]
    facts += [p.is_leaf, p.element_size(), p.nelement(), len(p) if p.ndim else None, p.is_floating_point(), p.layout]
    return [*map(str, facts), isinstance(p, torch.nn.Parameter), p is c.p, p in set(c.model.parameters()), p.is_sparse]


@action(ANY, works="123", reads=True)
def print_model(c: Context) -> Any:
    """``print(model)``."""
    return str(c.model)


@action(ANY, works="123", reads=True)
def count_parameters(c: Context) -> Any:
    """How many parameters there are, and which are trained."""
    named = c.model.named_parameters()
    return [(name, p.numel(), p.requires_grad, p.dtype.itemsize) for name, p in named]


# ------------------------------------------------------------------------------------------------- all of a state


@action(BETWEEN, works="12", reads=True)
def clone_state_dict(c: Context) -> Any:
    """The best weights so far, kept in memory."""
    return {name: value.clone() for name, value in c.model.state_dict().items()}


@action(BETWEEN, works="12", reads=True)
def torch_save_state_dict(c: Context) -> Any:
    """``torch.save`` of a state dict, and what a reader finds."""
    file = io.BytesIO()
    torch.save(c.model.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


@action(BETWEEN, works="12", reads=True)
def average_state_dict(c: Context) -> Any:
    """An exponential moving average over ``state_dict()``, as written by hand in many repositories."""
    average = c.kept.setdefault("average", {n: v.detach().clone() for n, v in c.model.state_dict().items()})
    for name, value in c.model.state_dict().items():
        if value.is_floating_point():
            average[name].mul_(0.9).add_(value.detach(), alpha=0.1)
    return average


@action(BETWEEN, works="12", reads=True)
def deepcopy_model(c: Context) -> Any:
    """A copy of the model, that computes."""
    twin = copy.deepcopy(c.model).eval()
    with torch.no_grad():
        return twin(sample(c))


@action(BETWEEN, works="12", reads=True)
def pickle_model(c: Context) -> Any:
    """The model through ``pickle``."""
    return [p.detach() for p in pickle.loads(pickle.dumps(c.model)).parameters()]


@action(BETWEEN, works="123", reads=True)
def clone_in_full_parameters(c: Context) -> Any:
    """The documented way: a state dict inside ``full_parameters``."""
    with lightning_zero.full_parameters(c.module):
        return {name: value.clone() for name, value in c.model.state_dict().items()}


@action((*BETWEEN[2:], "on_train_batch_end"), works="123", reads=True)
def save_checkpoint(c: Context) -> Any:
    """``trainer.save_checkpoint``, and the weights that a reader finds in it."""
    path = c.folder / f"{c.hook}-{c.pick}-{c.call}.ckpt"
    c.trainer.save_checkpoint(path)
    if path.is_dir():
        return dict(lightning_zero.load_full_state_dict(path))
    return dict(torch.load(path, weights_only=True)["state_dict"])


# ------------------------------------------------------------------------------------------ calls and generation


@action(CALLS, works="123", reads=True)
def extra_forward(c: Context) -> Any:
    """The model called for a look at what it does now."""
    training = c.model.training
    c.model.eval()
    with torch.no_grad():
        out = c.model(sample(c))
    c.model.train(training)
    return out


@action(CALLS, works="123", reads=True)
def evaluate_block(c: Context) -> Any:
    """A part of the model called alone."""
    with torch.no_grad():
        return c.a_block.eval()(sample(c)), c.a_block.train().training


@action(CALLS, works="12", reads=True)
def evaluate_layer(c: Context) -> Any:
    """A single layer of a unit called alone."""
    with torch.no_grad():
        return c.layer(sample(c)[:, :1].expand(3, c.layer.in_features))


@action(VALIDATION, works="123", reads=True)
def generate(c: Context) -> Any:
    """A loop that calls the model with an input that grows, as language models generate."""
    rows = sample(c, rows=1)
    with torch.no_grad():
        for _ in range(3):
            rows = torch.cat([rows, c.model(rows)[-1:].clamp(-3, 3)])
    return rows


@action(VALIDATION, works="12", reads=True)
def generate_as_long_as_it_takes(c: Context) -> Any:
    """The same, for another number of tokens on each rank."""
    rows = sample(c, rows=1)
    with torch.no_grad():
        for _ in range(2 + c.rank):
            rows = torch.cat([rows, c.model(rows)[-1:].clamp(-3, 3)])
    return rows


@action(("before_forward", "after_forward", "validation_step"), works="12")
def weight_outside_its_module(c: Context) -> Any:
    """A weight used by a function instead of its module: the loss may depend on it."""
    layer = c.layer
    out = F.linear(sample(c)[:, :1].expand(3, layer.in_features), layer.weight)
    c.module.add_to_loss(0.1 * out.square().mean())
    return out.detach()


@action(("before_forward", "validation_step", "on_train_batch_end"), works="12", reads=True)
def functional_call(c: Context) -> Any:
    """The model with other weights, by ``torch.func``."""
    weights = {name: 0.5 * p.detach() for name, p in c.model.named_parameters()}
    with torch.no_grad():
        return torch.func.functional_call(c.model, weights, (sample(c),))


# ------------------------------------------------------------------------------------------------- gradient norms


@action(AFTER_BACKWARD, works="123", reads=True, bound=1e-5, gradients=True)
def lightning_utility_grad_norm(c: Context) -> Any:
    """Lightning's own ``grad_norm``, by parameter."""
    return {name: float(norm) for name, norm in lightning_grad_norm(c.model, norm_type=2).items()}


@action(AFTER_BACKWARD, works="123", reads=True, bound=1e-5, gradients=True)
def package_grad_norm(c: Context) -> Any:
    """The documented way; summed in float64, so that the last bit differs."""
    return lightning_zero.grad_norm(c.module).float()


@action(AFTER_BACKWARD, works="123", reads=True, bound=1e-5, gradients=True)
def read_gradient_norm(c: Context) -> Any:
    """The norm of a gradient."""
    return None if c.p.grad is None else c.p.grad.norm().item()


@action(AFTER_BACKWARD, reads=True, gradients=True)
def clone_gradients(c: Context) -> Any:
    """Copies of all gradients."""
    return [None if p.grad is None else p.grad.clone() for p in c.model.parameters()]


@action(ANY, works="123", reads=True, gradients=True)
def which_have_gradients(c: Context) -> Any:
    """Which parameters have a gradient now, as guards ask."""
    return [name for name, p in c.model.named_parameters() if p.grad is not None]


@action(AFTER_BACKWARD, works="123", reads=True, gradients=True)
def full_gradient(c: Context) -> Any:
    """The documented way to read a gradient."""
    name = "model." + c.name
    if lightning_zero.engine.engine_of(c.module) is None:
        return None if c.p.grad is None else c.p.grad.clone()
    return lightning_zero.full_gradient(c.module, name)
