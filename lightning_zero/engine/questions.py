"""What can be asked of a parameter, and what be done with it, while its values are not in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_zero.errors import ParameterAccessError

__all__ = ["CASTS", "FREE", "MODELS", "OVERWRITES", "SHAPES", "STRIDES", "changes_nothing", "refusal"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FREE = _names("""
    __hash__ __len__ __delete__ size dim ndimension numel nelement element_size storage_offset get_device
    is_floating_point is_complex is_signed is_inference is_conj is_neg is_same_size has_names is_pinned
    register_hook register_post_accumulate_grad_hook requires_grad_ result_type can_cast promote_types
    _has_compatible_shallow_copy_type is_tensor is_storage typename _use_count is_nested
""")
"""Names of functions whose answer does not depend on values."""

MODELS = _names("""
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty
    new_full new_tensor new_empty_strided
""")
"""Where a parameter only says of what shape, dtype or device something else is to be."""

SHAPES = _names("view_as expand_as reshape_as type_as")
"""The same, of the second argument."""

CASTS = _names("""
    to type cpu cuda xpu float double half bfloat16 int long bool short char byte contiguous _to_copy
""")
"""What returns the tensor itself where nothing has to be changed."""

OVERWRITES = _names("""
    copy_ zero_ fill_ normal_ uniform_ exponential_ bernoulli_ random_ cauchy_ geometric_ log_normal_
""")
"""What leaves nothing of the values that were there. So do the functions of ``torch.nn.init``."""

STRIDES = _names("stride is_contiguous dim_order")
"""What a placeholder would tell of itself, and not of the values."""


def changes_nothing(name: str, tensor: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a conversion would return the tensor itself, asked of one element of its dtype on its device."""
    one = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    return getattr(one, name)(*args, **kwargs) is one


def refusal(names: Sequence[str], use: str) -> ParameterAccessError:
    """What is raised where ``use`` needs values that are absent, of parameters of these names."""
    name = f"'{names[0]}'" if names else "of a module that is gone"
    return ParameterAccessError(
        f"The values of parameter {name} are not in memory here, and {use} needs them: they are spread "
        "over the ranks, and there only while a module that owns them runs. Call that module instead of reading its "
        "weight, or make a module around both the unit (ZeroStrategy(units=[...])). To look at values, change them, or "
        "take `state_dict()`, use `with lightning_zero.full_parameters(module):` on every rank; for an average of "
        "weights, do so in a callback at the end of an epoch. To save, `trainer.save_checkpoint` needs none of this. "
        "Another strategy cannot run what is sharded: give it a `copy.deepcopy(module)` that was made there."
    )
