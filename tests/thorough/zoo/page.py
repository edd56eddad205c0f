"""``docs/models.md``, made of the tables of the zoo."""

from __future__ import annotations

import importlib

__all__ = ["LIBRARIES", "names", "section", "text"]

LIBRARIES = ("torch", "transformers", "timm", "torchvision", "peft", "diffusers", "torch_geometric")

_HEAD = """# Models

Two ranks with different data have trained each of these architectures for four steps, from random weights and with
dropout, under DDP and in every stage. Losses, weights and buffers are DDP's, bit for bit. In those that accumulate,
`zero2` and `zero3` sum in another order, and are within 1e-5 of DDP in double precision. To repeat it:
`pip install -e ".[dev,zoo]"` and `pytest -m zoo`.
"""


def names(library: str) -> list[str]:
    """What is played of a library, which has to be installed."""
    return [a.name for a in importlib.import_module(f"tests.thorough.zoo.{library}_models").ARCHITECTURES]


def section(library: str, played: list[str]) -> str:
    """What the page says of a library."""
    return f"## {library} ({len(played)})\n\n{', '.join(played)}\n"


def text() -> str:
    """The page."""
    return "\n".join([_HEAD, *(section(library, names(library)) for library in LIBRARIES)])
