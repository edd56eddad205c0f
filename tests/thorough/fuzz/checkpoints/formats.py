"""A small valid checkpoint of every format, and what is in one, in few bytes."""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from lightning_zero.checkpoint import consolidate_checkpoint, open_checkpoint, save_checkpoint_directory
from lightning_zero.comm import ControlGroup
from tests.helpers.samples import checkpoint, end_to_end, parameters

FIXTURES = Path(__file__).parents[3] / "fixtures" / "format1"
ALONE = ControlGroup(None)


def _content() -> dict[str, Any]:
    """Lightning's dictionary with tensors as they are."""
    weights = {name: value for name, value in parameters().items() if value.numel()}
    state = {number: {"step": torch.tensor(3.0), "exp_avg": value * 2} for number, value in enumerate(weights.values())}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(state)}]
    rest = {"epoch": 1, "global_step": 7, "callbacks": {"x": {"best": 0.5}}, "hyper_parameters": {"width": 8}}
    return {"state_dict": weights, "optimizer_states": [{"state": state, "param_groups": groups}], **rest}


def _own(path: Path) -> None:
    content = checkpoint(1, end_to_end, ALONE)
    content["state_dict"]["sparse"] = torch.eye(3).to_sparse()  # a value with an archive of its own
    save_checkpoint_directory(content, path, ALONE, plan_summary={"stage": 3})


def _without(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        _own(path)
    finally:
        torch.serialization.set_crc32_options(True)


def _stock(path: Path, top: str = "state_dict") -> None:
    content = _content()
    (optimizer,) = content["optimizer_states"]
    dcp.save({top: content["state_dict"], "optimizer_0": optimizer}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1, "callbacks": {"x": torch.ones(3)}}, path / "meta.pt")


def _hub(path: Path) -> None:
    torch.save(_content(), path.with_suffix(".whole"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        consolidate_checkpoint(path.with_suffix(".whole"), path, format="safetensors", max_shard_size=300)
    path.with_suffix(".whole").unlink()


def _safetensors(path: Path) -> None:
    save_file(_content()["state_dict"], path)


FORMATS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "own": ("c", _own),
    "own without crc": ("c", _without),
    "own, first format": ("c", lambda path: shutil.copytree(FIXTURES / "zero3.ckpt", path)),
    "stock": ("c", _stock),
    "FSDPStrategy": ("c", lambda path: _stock(path, "model")),
    "torch": ("x.ckpt", lambda path: torch.save(_content(), path)),
    "torch before 1.6": (
        "x.ckpt",
        lambda path: torch.save(_content(), path, _use_new_zipfile_serialization=False),
    ),
    "safetensors": ("x.safetensors", _safetensors),
    "hub": ("c", _hub),
}
"""By name, what the file or folder is called, and what writes it."""


def written(folder: Path) -> dict[str, Path]:
    """One of each, in a folder of its own."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (kind, (name, write)) in enumerate(FORMATS.items()):
            (folder / str(number)).mkdir()
            found[kind] = folder / str(number) / name
            write(found[kind])
    return found


def fingerprint(path: Path) -> str:
    """A digest of all that a run gets that resumes, every element read."""
    digest = hashlib.sha256()
    _digest(open_checkpoint(path, ALONE, verify="sample"), digest, 0)
    return digest.hexdigest()


def _digest(value: Any, digest: Any, depth: int) -> None:
    if depth > 100:
        raise RecursionError("deeper than any sample")
    digest.update(f"{type(value).__name__}(".encode())
    if isinstance(value, Tensor):
        value = value.to_dense() if value.layout is not torch.strided else value
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key)[:1000].encode())
            _digest(item, digest, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest(item, digest, depth + 1)
    else:
        digest.update(repr(value)[:100_000].encode())
    digest.update(b")")
