"""What torch functions need of a tensor: nothing of its values, this rank's elements of it, or all.

[Note: not every elementwise function does with a part]
A loop over a tensor runs vectorised and ends with single elements, so what an element gets may depend on how far from
the end it is. That makes no difference where the result is the correctly rounded one (sums, products, square roots)
or no rounding happens at all. It does for most transcendental functions, for general powers, for formulas that a
vectorised loop rounds once and a single element twice, for products of complex numbers, and for the sign of the larger
of two zeros. Those are not listed here. A NaN is a NaN, whatever its payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.errors import ParameterAccessError

__all__ = [
    "CASTS",
    "Elementwise",
    "FREE",
    "LIKE",
    "MODELS",
    "NEW",
    "OVERWRITES",
    "QUESTIONS",
    "SHAPES",
    "STRIDES",
    "changes_nothing",
    "elementwise",
    "not_linear_from",
    "refusal",
    "words",
]


def words(text: str) -> frozenset[str]:
    """The words of a text, for lists of names."""
    return frozenset(text.split())


_UNARY = (
    "neg negative abs absolute sign sqrt square relu floor ceil round trunc fix frac reciprocal nan_to_num isnan isinf "
    "isfinite isposinf isneginf signbit logical_not bitwise_not invert"
)
_BINARY = (
    "add sub subtract rsub mul multiply div divide true_divide rdiv truediv copysign clamp clip clamp_min clamp_max gt "
    "greater ge greater_equal lt less le less_equal eq ne not_equal logical_and logical_or logical_xor bitwise_and "
    "bitwise_or bitwise_xor and or xor pow"
)
_OTHERS = "where masked_fill lerp addcmul addcdiv fill zero copy"
_NAMES = words(f"{_UNARY} {_BINARY} {_OTHERS}")
_OPERATORS = words("add sub mul truediv div pow and or xor")
_COMPLEX = words("add sub subtract fill zero copy masked_fill where eq ne isnan isfinite")
_SCALES = words("mul multiply div divide true_divide")
_SUMS = words("neg negative add iadd radd sub subtract isub rsub zero fill copy where masked_fill")
_FACTORS = words("mul multiply rmul div divide true_divide truediv")
_BOUNDS = words("clamp clip clamp_min clamp_max")
_EXPONENTS = (0, 0.5, 1, 2, 3, -1, -2)  # those that torch turns into products, roots and quotients
_HALF = (torch.float16, torch.bfloat16)


class Elementwise(NamedTuple):
    """A listed function: its name without underscores, and whether it writes to its first argument."""

    name: str
    in_place: bool

    def exact(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call gives the same bits for a part as for the whole. Depends on nothing that is a rank's own."""
        values = (*args, *kwargs.values())
        operands = [value for value in values if isinstance(value, Tensor)]
        if self.name == "pow":
            exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
            if not isinstance(exponent, int | float) or exponent not in _EXPONENTS:
                return False
        if self.name in _BOUNDS and len(operands) > 1:
            return False
        if kwargs.get("rounding_mode") is not None or kwargs.get("decimals"):
            return False
        if kwargs.get("alpha", 1) != 1:
            tensors = [operand for operand in operands if operand.dim()]
            if len(tensors) < 2 or any(operand.dtype in _HALF for operand in operands):
                return False
        wide = [v for v in values if isinstance(v, complex) or (isinstance(v, Tensor) and v.is_complex())]
        if wide and self.name in _SCALES:
            return len(wide) == 1 and wide[0] is args[0]
        return not wide or self.name in _COMPLEX


def elementwise(name: str, module: str | None) -> Elementwise | None:
    """The listed function of a name, with its underscores, and of the module where it says it is from."""
    if module in ("torch.nn.functional", "torch.nn.init"):  # with switches of their own
        return None
    in_place = name.endswith("_") and not name.startswith("__")
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[:1] in ("i", "r") and name[1:] in _OPERATORS:
            if name == "rpow":
                return None
            in_place, name = name[0] == "i", name[1:]
    name = name.removesuffix("_")
    return Elementwise(name, in_place) if name in _NAMES else None


def not_linear_from(name: str) -> int:
    """From which argument on a listed function, with its underscores, does not commute with averages over the ranks."""
    name = name.removeprefix("_foreach_").strip("_")
    return 9 if name in _SUMS else 1 if name.removeprefix("i") in _FACTORS else 0


QUESTIONS = words("""
    __len__ size dim ndimension numel nelement element_size storage_offset get_device is_floating_point is_complex
    is_signed is_inference is_conj is_neg has_names _has_compatible_shallow_copy_type
""")
"""Names of functions whose answer does not depend on values, of anything that looks like a tensor."""

FREE = QUESTIONS | words("""
    __hash__ __delete__ is_same_size is_pinned register_hook register_post_accumulate_grad_hook requires_grad_
    result_type can_cast promote_types is_tensor is_storage typename _use_count is_nested
""")
"""The same, of a parameter."""

LIKE = words("zeros_like ones_like empty_like full_like rand_like randn_like randint_like")
NEW = words("new_zeros new_ones new_empty new_full new_tensor")
MODELS = LIKE | NEW | words("new_empty_strided")
"""Where a parameter only says of what shape, dtype or device something else is to be."""

SHAPES = words("view_as expand_as reshape_as type_as")
"""The same, of the second argument."""

CASTS = words("""
    to type cpu cuda xpu float double half bfloat16 int long bool short char byte contiguous _to_copy
""")
"""What returns the tensor itself where nothing has to be changed."""

OVERWRITES = words("""
    copy_ zero_ fill_ normal_ uniform_ exponential_ bernoulli_ random_ cauchy_ geometric_ log_normal_
""")
"""What leaves nothing of the values that were there. So do the functions of ``torch.nn.init``."""

STRIDES = words("stride is_contiguous dim_order")
"""What a placeholder would tell of itself, and not of the values."""


def changes_nothing(name: str, tensor: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a conversion would return the tensor itself, asked of one element of its dtype on its device."""
    one = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    return getattr(one, name)(*args, **kwargs) is one


def refusal(names: Sequence[str], use: str) -> ParameterAccessError:
    """What is raised where ``use`` needs values that are absent, of parameters of these names."""
    name = f"'{names[0]}'" if names else "of a module that is gone"
    return ParameterAccessError(
        f"The values of parameter {name} are not in memory here, and {use} needs them: each rank holds a slice. "
        "Write `with lightning_zero.full_parameters(module):` around it, on every rank; for a momentum teacher, "
        "`lightning_zero.ema_update(teacher, student, momentum)` in place of the loop. To save, "
        "`trainer.save_checkpoint` and `fabric.save` need none of this. Another strategy cannot run what is sharded: "
        "give it a `copy.deepcopy(module)` that was made there. In a forward or a backward values are gathered, unless "
        "code is compiled, traced or transformed, or runs in a thread of its own."
    )
