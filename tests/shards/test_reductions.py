"""A reduction of slices is that of the whole tensor, whatever the cut, from what the ranks send one another."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import ParameterAccessError
from lightning_zero.shards import reductions
from lightning_zero.shards.reductions import Combine
from lightning_zero.shards.sliced_tensor import SlicedTensor


class Ranks:
    """Three ranks, a thread each, that put numbers together."""

    def __init__(self) -> None:
        self.rows: list[Any] = [None] * 3
        self.barrier = threading.Barrier(3, timeout=20)
        self.rounds = 0

    def of(self, rank: int) -> Any:
        def together(what: str, history: int, numbers: Tensor, combine: Combine) -> Tensor:
            self.rows[rank] = (what, history, numbers)
            self.rounds += rank == 0
            self.barrier.wait()
            rows = list(self.rows)
            self.barrier.wait()
            assert len({row[:2] for row in rows}) == 1
            each = torch.stack([row[2] for row in rows])
            return each if combine is Combine.EACH else each.amax(0) if combine is Combine.LARGEST else each.sum(0)

        return together

    def play(self, whole: Tensor, act: Callable[[Any], Any], ends: Sequence[int]) -> list[Any]:
        """What ``act`` gives of each rank's slice."""
        found: list[Any] = [None] * 3

        def run(rank: int, start: int, end: int) -> None:
            try:
                own = whole.reshape(-1)[start:end].clone()
                found[rank] = act(SlicedTensor(own, start, whole.shape, "w", together=self.of(rank)))
            except Exception as error:
                found[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=run, args=(i, *cut)) for i, cut in enumerate(itertools.pairwise(ends))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def last(g: Tensor, name: str, *args: Any, **kwargs: Any) -> Tensor:
    """A method along the last dimension, if there is one."""
    return getattr(g, name)(*args, **kwargs, **({"dim": -1} if g.ndim else {}))


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"order {p}": lambda g, p=p: torch.linalg.vector_norm(g, p) for p in (1, 2, 3.5, 0, -1, math.inf, -math.inf)},  # type: ignore[misc]
    "norm": lambda g: g.norm(),
    "torch.norm": lambda g: torch.norm(g, p="fro"),
    "linalg.norm": lambda g: torch.linalg.norm(g),
    "norm in another dtype": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "sum": lambda g: g.sum() / g.abs().sum(),
    "mean": lambda g: g.square().mean(),
    "max": lambda g: g.max(),
    "min": lambda g: torch.min(g),
    "std": lambda g: g.std() if g.ndim else g.std(correction=0),
    "var": lambda g: torch.var(g, correction=0),
    "finite": lambda g: g.isfinite().all(),
    "nan": lambda g: torch.isnan(g).any(),
    "how many": lambda g: torch.count_nonzero(g > 0),
    "norms of rows": lambda g: last(g, "norm", 2, keepdim=bool(g.ndim)) if g.ndim else g.norm(),
    "norms of all but the first": lambda g: (
        g.norm(dim=tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 else g.norm()
    ),
    "largest of rows": lambda g: last(g, "amax"),
    "sums of rows": lambda g: last(g.abs(), "sum"),
    "of an index": lambda g: g[0].norm() if g.ndim else g.norm(),
    "foreach": lambda g: torch.stack(torch._foreach_norm([g, torch.ones(2, dtype=g.dtype), g * 2])),
    "total": lambda g: torch.nn.utils.get_total_norm([g, g]),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ACTS)
def test_it_is_that_of_the_whole(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "_PIECE_NUMEL", 16)
    act = ACTS[name]
    for shape, special in itertools.product([(), (7,), (4, 1, 6), (9, 11), (3, 50)], (None, math.nan, math.inf)):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        if special is not None:
            whole.view(-1)[-1] = special
        expected = act(whole.clone())
        bound = 1e-12 if expected.dtype is torch.float64 else max(BOUNDS[dtype], 1e-6)
        if name == "norm in another dtype":
            bound = 1e-12
        for ends in ((0, whole.numel() // 5, whole.numel() // 5, whole.numel()), (0, 0, whole.numel(), whole.numel())):
            ranks = Ranks()
            for found in ranks.play(whole, act, ends):
                torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)
            assert ranks.rounds == (2 if name == "sum" else 1)


def test_without_anybody_to_ask_and_without_elements() -> None:
    part = SlicedTensor(torch.ones(2), 0, (2, 3), "w")
    with pytest.raises(ParameterAccessError, match=r"norm\(\) needs more than this rank's slice"):
        part.norm()
    ranks = Ranks()
    assert ranks.play(torch.empty(0, 3), lambda g: float(g.norm() + g.sum()), (0, 0, 0, 0)) == [0.0] * 3
    assert ranks.rounds == 0


@pytest.mark.parametrize(
    "act",
    [
        lambda g: (100 * g).sum(dtype=torch.int64),  # elements are cast before they are added up
        lambda g: g.sum(dtype=torch.float16),
        lambda g: g.isfinite().all(dim=()),  # reduces nothing
        lambda g: torch.any(g, ()),
    ],
)
def test_what_is_not_the_same_of_numbers_that_were_put_together(act: Callable[[Tensor], Tensor]) -> None:
    ranks = Ranks()
    for error in ranks.play(torch.randn(5, 4), act, (0, 3, 9, 20)):
        assert isinstance(error, ParameterAccessError)
    assert ranks.rounds == 0
