from __future__ import annotations

import pytest
import torch

from lightning_zero.plan.layout import DtypeRules, ParameterSpec

WEIGHT = ParameterSpec("weight", (), (4,), torch.float32, True)
FROZEN = ParameterSpec("frozen", (), (4,), torch.float32, False)
CODES = ParameterSpec("codes", (), (4,), torch.int8, False)
COMPLEX = ParameterSpec("complex", (), (4,), torch.complex64, True)


@pytest.mark.parametrize(
    ("rules", "spec", "compute", "reduce"),
    [
        (DtypeRules(), WEIGHT, torch.float32, torch.float32),
        (DtypeRules(param_dtype=torch.bfloat16), WEIGHT, torch.bfloat16, torch.float32),
        (DtypeRules(param_dtype=torch.bfloat16, reduce_dtype=torch.float16), WEIGHT, torch.bfloat16, torch.float16),
        (DtypeRules(param_dtype=torch.bfloat16, keep=frozenset({"weight"})), WEIGHT, torch.float32, torch.float32),
        (DtypeRules(param_dtype=torch.bfloat16, reduce_dtype=torch.float16), FROZEN, torch.bfloat16, torch.bfloat16),
        (DtypeRules(param_dtype=torch.bfloat16, reduce_dtype=torch.float16), CODES, torch.int8, torch.int8),
        (DtypeRules(param_dtype=torch.bfloat16, reduce_dtype=torch.float16), COMPLEX, torch.complex64, torch.complex64),
    ],
)
def test_dtypes(rules: DtypeRules, spec: ParameterSpec, compute: torch.dtype, reduce: torch.dtype) -> None:
    assert (rules.compute(spec), rules.reduce(spec)) == (compute, reduce)


@pytest.mark.parametrize("setting", ["param_dtype", "reduce_dtype"])
def test_only_floating_dtypes(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        DtypeRules(**{setting: torch.int32})
