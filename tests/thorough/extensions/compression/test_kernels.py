"""Triton's kernels give the bits of torch's operators: in Triton's interpreter, in what it compiles, and on a GPU."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.extensions.compression import codes
from tests.helpers.device_runs import needs_gpu, run_on

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
CPU = torch.device("cpu")


@needs_triton
def test_kernels_give_the_operators_bits_in_the_interpreter() -> None:
    (found,) = run_on("cpu", "kernels", before=["env", "TRITON_INTERPRET=1", "PYTHONWARNINGS=ignore::RuntimeWarning"])
    assert len(found) == 2 * 4 * 4 * 2
    assert all(found.values()), [name for name, same in found.items() if not same]


@needs_gpu
@needs_triton
def test_kernels_give_the_operators_bits_on_a_gpu() -> None:
    (found,) = run_on("cuda", "kernels")
    assert all(found.values()), [name for name, same in found.items() if not same]


@needs_triton
def test_each_operation_is_compiled_to_one_that_rounds_to_the_nearest(tmp_path: Path) -> None:
    """None is approximate, none is contracted with another, and none takes subnormal numbers for zero."""
    (found,) = run_on("cpu", "compiled", before=["env", f"TRITON_CACHE_DIR={tmp_path}"])
    assert len(found) == 4 * 2 * 3
    for name, operations in found.items():
        assert operations, name
        for operation in operations:
            assert operation.partition(".")[0] in {"add", "sub", "mul", "div"}, (name, operation)
            assert ".rn." in operation, (name, operation)
            assert "ftz" not in operation, (name, operation)


class Wrong:
    """Kernels that are one off, or do not compile."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def compress(self, kind: Any, values: Any, made: Any, residual: Any) -> None:
        if self.error is not None:
            raise self.error
        codes.compress(kind, values, made, residual)
        made[3] += 1

    def decompress(self, kind: Any, made: Any, values: Any) -> None:
        codes.decompress(kind, made, values)


@pytest.mark.parametrize(
    ("kernels", "told"),
    [
        (Wrong(), "to int8: they give other bits than torch's operators"),
        (Wrong(RuntimeError("no C compiler")), "to int8: RuntimeError: no C compiler"),
    ],
)
def test_kernels_that_fail_or_are_wrong_are_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, kernels: Wrong, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_zero.extensions.compression.kernels", kernels)  # type: ignore[misc]
    monkeypatch.setattr(codes, "kernels", kernels, raising=False)
    with pytest.warns(UserWarning, match=told):
        assert codes._kernels.__wrapped__("int8", torch.float32, CPU) is None


def test_without_triton_the_operators_do_it_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an ImportError
    monkeypatch.delitem(sys.modules, "lightning_zero.extensions.compression.kernels", raising=False)
    monkeypatch.delattr(codes, "kernels", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codes._kernels.__wrapped__("int8", torch.float32, CPU) is None
