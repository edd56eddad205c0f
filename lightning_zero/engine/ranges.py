"""A range of a tensor's elements, without making the rest contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["flat_range"]


def flat_range(tensor: Tensor, start: int, numel: int) -> Tensor:
    """``tensor.reshape(-1)[start : start + numel]``, where only that range may have to be copied.

    Args:
        tensor: any shape and strides, for example expanded.
        start: first element, in logical order.
        numel: how many; not beyond the last one.

    Returns:
        1-D, contiguous; a view where the elements lie in a row.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[start : start + numel]
    if tensor.dim() == 1:
        return tensor[start : start + numel].contiguous()
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    if not row or not numel:
        return tensor.new_empty(0)
    first, last = start // row, (start + numel - 1) // row
    if first == last:
        return flat_range(tensor[first], start - first * row, numel)
    head = flat_range(tensor[first], start - first * row, (first + 1) * row - start)
    tail = flat_range(tensor[last], 0, start + numel - last * row)
    return torch.cat([head, tensor[first + 1 : last].reshape(-1), tail])
