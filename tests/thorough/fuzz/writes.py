"""Writing weights: in place, through ``.data``, by assignment, by loading."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import lightning_zero
from tests.thorough.fuzz.vocabulary import AFTER_BACKWARD, BETWEEN, Context, action

# Where torch lets a weight be written without breaking a backward that is still to come.
WRITES = ("configure_optimizers", *BETWEEN, "before_forward", *AFTER_BACKWARD)


# ------------------------------------------------------------------------------------------------------- in place


@action(WRITES, works="12", inside="12")
def clamp_weight(c: Context) -> None:
    """Weight clipping, as in a Wasserstein critic."""
    with torch.no_grad():
        c.p.clamp_(-0.1, 0.1)


@action(WRITES, works="12", inside="12")
def add_noise_to_weight(c: Context) -> None:
    """The same noise on every rank."""
    with torch.no_grad():
        c.p.add_(c.like(c.p))


@action(WRITES)
def add_own_noise_to_weight(c: Context) -> None:
    """Noise that differs between ranks."""
    with torch.no_grad():
        c.p.add_(c.like(c.p, per_rank=True))


@action(WRITES, alone=True)
def write_on_rank_zero_only(c: Context) -> None:
    """A write that only the first rank makes."""
    if c.rank == 0:
        with torch.no_grad():
            c.p.mul_(0.5)


@action(WRITES, works="12", inside="12")
def scale_weight_data(c: Context) -> None:
    """The old way around autograd."""
    c.p.data.mul_(0.9)


@action(WRITES, works="12", inside="12")
def fill_first_row(c: Context) -> None:
    """An assignment to a part of a weight, as a padding row is zeroed."""
    with torch.no_grad():
        if c.p.ndim:
            c.p[0] = 0.25
        else:
            c.p.fill_(0.25)


@action(WRITES, works="12")
def scale_all_weights_at_once(c: Context) -> None:
    """One call for all weights."""
    with torch.no_grad():
        torch._foreach_mul_([p for p in c.model.parameters() if p.requires_grad], 0.95)


@action(WRITES)
def initialise_weight_unseeded(c: Context) -> None:
    """The same with the numbers that the rank's generator gives, which differ between ranks."""
    nn.init.normal_(c.p, std=0.1)


@action(WRITES, works="12")
def reset_parameters(c: Context) -> None:
    """A layer's own initialisation again."""
    torch.manual_seed(c.pick)
    c.layer.reset_parameters()


@action(("on_train_batch_end", "on_train_epoch_end", "on_before_zero_grad"), works="12")
def write_through_kept_alias(c: Context) -> None:
    """Through a tensor that was taken when the action was called first."""
    alias = c.kept.setdefault("alias", c.p.data)
    alias.mul_(0.9)


@action(WRITES, works="123")
def write_in_full_parameters(c: Context) -> None:
    """The documented way."""
    with lightning_zero.full_parameters(c.module), torch.no_grad():
        c.p.mul_(0.5)


# --------------------------------------------------------------------------------------------------- by assignment


@action(WRITES, works="12")
def assign_data(c: Context) -> None:
    """``p.data = tensor``."""
    c.p.data = c.like(c.p)


@action(WRITES)
def assign_data_of_other_dtype(c: Context) -> None:
    """``p.data = p.data.half()``, for one parameter."""
    c.p.data = c.like(c.p).half()


@action(WRITES)
def assign_data_of_other_shape(c: Context) -> None:
    """A layer that grows through ``.data``."""
    c.p.data = c.p.new_zeros((*c.p.shape[:-1], (c.p.shape[-1] if c.p.ndim else 0) + 1))


@action(WRITES, works="12")
def vector_to_parameters(c: Context) -> None:
    """All weights from one vector."""
    parameters = list(c.model.parameters())
    vector = c.like(parameters[0].new_empty(sum(p.numel() for p in parameters)))
    torch.nn.utils.vector_to_parameters(vector, parameters)


@action(WRITES)
def swap_tensors(c: Context) -> None:
    """``torch.utils.swap_tensors`` with a new parameter."""
    torch.utils.swap_tensors(c.p, nn.Parameter(c.like(c.p)))


@action(WRITES, parts=True)
def set_weight(c: Context) -> None:
    """``p.set_(tensor)``. Once: a second one would hide that the ranks of DDP have parted in between."""
    if c.call == 0:
        with torch.no_grad():
            c.p.set_(c.like(c.p))


@action(WRITES)
def half_precision(c: Context) -> None:
    """``model.half()``."""
    c.model.half()


@action(WRITES)
def double_precision_and_back(c: Context) -> None:
    """To float64 and back, which changes nothing that is seen."""
    dtype = c.layer.weight.dtype
    c.layer.to(torch.float64).to(dtype)


@action(BETWEEN, works="123", reads=True)
def move_to_where_it_is(c: Context) -> None:
    """Moves that move nothing."""
    c.model.to("cpu").to(c.layer.weight.dtype).cpu()
    c.layer.to(torch.device("cpu"), c.layer.weight.dtype)


@action(WRITES)
def replace_parameter(c: Context) -> None:
    """A new Parameter object under the name of the old one."""
    c.layer.weight = nn.Parameter(c.like(c.layer.weight))


@action(WRITES)
def delete_bias(c: Context) -> None:
    """``layer.bias = None``."""
    c.layer.bias = None


@action(WRITES)
def tie_weights_later(c: Context) -> None:
    """Two blocks that share a weight from now on."""
    c.a_block.up.bias = nn.Parameter(torch.zeros_like(c.a_block.up.bias))
    c.layer.bias = c.layer.bias


# ----------------------------------------------------------------------------------------------- loading and wrappers


@action(WRITES, works="12")
def load_initial_state(c: Context) -> None:
    """Rewinding: the state dict of the beginning."""
    c.model.load_state_dict(c.module.initial)


@action(WRITES)
def load_initial_state_by_assignment(c: Context) -> None:
    """``load_state_dict(assign=True)``."""
    c.model.load_state_dict(copy.deepcopy(c.module.initial), assign=True)


@action(("on_train_batch_end", "on_train_epoch_end", "on_validation_end"), works="12")
def load_checkpoint_weights(c: Context) -> None:
    """Weights of a checkpoint that was saved a moment ago, loaded by hand at the next call."""
    path = c.folder / f"load-{c.hook}-{c.pick}.ckpt"
    if c.call == 0:
        c.trainer.save_checkpoint(path, weights_only=True)
        return
    state = lightning_zero.load_full_state_dict(path) if path.is_dir() else torch.load(path)["state_dict"]
    c.module.load_state_dict(state)


@action(WRITES, parts=True)
def parametrise(c: Context) -> None:
    """``parametrize.register_parametrization``."""

    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 0.5 * weight

    if c.call == 0:
        parametrize.register_parametrization(c.layer, "weight", Halved())


@action(WRITES)
def prune_layer_with_mask(c: Context) -> None:
    """Pruning that keeps its mask."""
    if c.call == 0:
        prune.l1_unstructured(c.layer, "weight", amount=0.3)


@action((*BETWEEN, "before_forward", "after_forward"), works="12", models=("momentum",))
def move_teacher(c: Context) -> None:
    """The teacher follows the student, through ``.data``."""
    for teacher, student in zip(c.model.teacher.parameters(), c.model.student.parameters(), strict=True):
        teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


@action(BETWEEN, works="12", models=("momentum",))
def load_student_into_teacher(c: Context) -> None:
    """The teacher becomes the student, by state dict."""
    c.model.teacher.load_state_dict(c.model.student.state_dict())


# Not between a forward and its backward, in which units are needed as they were.
@action(tuple(hook for hook in BETWEEN if hook != "on_before_zero_grad"), works="123", models=("momentum",))
def move_teacher_in_full_parameters(c: Context) -> None:
    """The teacher follows in the documented way."""
    with lightning_zero.full_parameters(c.module), torch.no_grad():
        for teacher, student in zip(c.model.teacher.parameters(), c.model.student.parameters(), strict=True):
            teacher.mul_(0.9).add_(student, alpha=0.1)


@action(WRITES, works="12", models=("frozen", "momentum"))
def write_frozen_weight(c: Context) -> None:
    """A write to a parameter that is not trained."""
    frozen = [p for p in c.model.parameters() if not p.requires_grad]
    frozen[c.pick % len(frozen)].data.mul_(0.5)
