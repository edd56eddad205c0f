"""``docs/models.md``, made of the tables of the zoo."""

from __future__ import annotations

import importlib

__all__ = ["LIBRARIES", "names", "section", "text"]

LIBRARIES = ("torch", "transformers", "timm", "torchvision", "peft", "diffusers", "torch_geometric")

_HEAD = """# Models

Each of these architectures has been trained with random weights by two processes, under DDP and in `zero1`, `zero2`
and `zero3`, with dropout and different data per process: four steps, a third of them with clipping. Losses, weights and
buffers are DDP's, bit for bit. Some accumulate two batches per step. There `zero1` is DDP's bit for bit, and `zero2`
and `zero3`, which sum in another order, are within 1e-5 of it, in double precision.

The tests behind this page: `pip install -e ".[dev,zoo]"` and `pytest -m zoo`, or `python -m tests.zoo NAME` for one.
Those of torch itself are part of every test run. `python -m tests.zoo --page` writes the page.
"""


def names(library: str) -> list[str]:
    """What is played of a library, which has to be installed."""
    return [a.name for a in importlib.import_module(f"tests.zoo.{library}_models").ARCHITECTURES]


def section(library: str, played: list[str]) -> str:
    """What the page says of a library."""
    return f"## {library} ({len(played)})\n\n{', '.join(played)}\n"


def text() -> str:
    """The page."""
    return "\n".join([_HEAD, *(section(library, names(library)) for library in LIBRARIES)])
