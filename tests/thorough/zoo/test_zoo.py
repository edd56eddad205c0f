"""The zoo: torch's own modules in every run, the libraries' with ``pytest -m zoo``."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.thorough.zoo import page, torch_models
from tests.thorough.zoo.play import Architecture, hold

_MISSING = [library for library in page.LIBRARIES if importlib.util.find_spec(library) is None]


def _played(library: str) -> list[Architecture]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own
        return list(importlib.import_module(f"tests.thorough.zoo.{library}_models").ARCHITECTURES)


_FOREIGN: list[Any] = [
    architecture
    for library in page.LIBRARIES
    if library != "torch" and library not in _MISSING
    for architecture in _played(library)
]


@pytest.mark.parametrize("architecture", torch_models.ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_a_module_of_torch_is_trained_as_under_ddp(architecture: Architecture) -> None:
    hold(architecture)


@pytest.mark.zoo
@pytest.mark.parametrize("architecture", _FOREIGN, ids=lambda architecture: architecture.name)
def test_an_architecture_is_trained_as_under_ddp(architecture: Architecture) -> None:
    hold(architecture)


@pytest.mark.zoo
@pytest.mark.parametrize("library", page.LIBRARIES)
def test_the_library_is_installed(library: str, request: pytest.FixtureRequest) -> None:
    if "zoo" not in request.config.option.markexpr:
        pytest.skip("asked for other tests")
    assert library not in _MISSING, f'install the libraries with `pip install -e ".[dev,zoo]"`; missing: {library}'


def test_the_page_names_what_is_played() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    assert page.section("torch", [a.name for a in torch_models.ARCHITECTURES]) in text
    for library in page.LIBRARIES:
        if library not in _MISSING:
            assert page.section(library, page.names(library)) in text, "python -m tests.thorough.zoo --page"
