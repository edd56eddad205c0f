"""Without any one of its extensions the package imports, trains, saves and resumes, and names what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.registry import EXTENSIONS, extension, installed
from tests.helpers.script import run_script

THERE = [name for name in EXTENSIONS if installed(name)]

# Where nothing asks for it by name: an error says what it cannot say without it.
RAISED = {"watch": "CommunicationError"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the package without each of them."""
    folder = tmp_path_factory.mktemp("deleted")
    run_script([str(Path(__file__).with_name("deleted.py")), str(folder), *THERE], cwd=folder, timeout=600.0)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in THERE}


@pytest.mark.parametrize("name", THERE)
def test_the_rest_works_without_it(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    assert f"/{name}/lightning_zero/" in result["from"]
    assert result["trained"] == "trained"
    for message in result["asked"]:
        assert message.startswith(RAISED.get(name, "ExtensionError")), message
        assert f"'{name}'" in message, message


def test_registry_knows_what_is_there() -> None:
    assert installed("nvme") == (extension_folder("nvme"))
    with pytest.raises(KeyError, match="no extension is called"):
        extension("nothing")


def extension_folder(name: str) -> bool:
    import lightning_zero.extensions as folder

    (path,) = folder.__path__
    return any(Path(path, known).exists() for known in (name, f"{name}.py"))
