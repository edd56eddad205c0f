"""Checkpoints behind a web server: no folder is listed, nothing beside the standard library is needed."""

from __future__ import annotations

import http.server
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import save_file
from torch import nn

from lightning_zero import consolidate_checkpoint, load_full_state_dict
from lightning_zero.checkpoint import StoredTensor, is_checkpoint_directory_at, open_checkpoint, verify_checkpoint
from lightning_zero.checkpoint.storage.files import open_folder, read_bytes
from lightning_zero.errors import CheckpointError
from tests.checkpoint.samples import control
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the files of a folder, or parts of them, and lists nothing."""

    server: Server

    def do_GET(self) -> None:
        name = unquote(self.path.partition("?")[0])
        self.server.asked.append((name, self.headers.get("Range")))
        status = self.server.statuses.get(name)
        file = self.server.folder / name.strip("/")
        if status is not None or not file.is_file():
            self.send_error(status or 404)
            return
        content = file.read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if self.server.ranges and part is not None:
            start, end = int(part[1]), min(int(part[2]), len(content) - 1)
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
            content = content[start : end + 1]
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{self.server.version}"')
        if self.server.says_length:
            self.send_header("Content-Length", str(len(content) + self.server.missing))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """See ``Handler``.

    Attributes:
        asked: paths and ranges of all requests.
        statuses: what to answer in place of a file.
        ranges: whether it can send parts.
        says_length: whether it says how long a file is.
        missing: bytes that it announces and does not send.
        version: of all files.
    """

    daemon_threads = False
    block_on_close = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.asked: list[tuple[str, str | None]] = []
        self.statuses: dict[str, int] = {}
        self.ranges, self.says_length, self.missing, self.version = True, True, 0, 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Of an empty folder; copies go to another one, which is empty again at the end. fsspec has nothing for http."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    (tmp_path / "served").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with serving(tmp_path / "served") as server:
        yield server
    assert list((tmp_path / "temporary").iterdir()) == []


def a_checkpoint() -> dict[str, Any]:
    return {"pytorch-lightning_version": "2.6.0", "epoch": 3, "state_dict": {"weight": torch.arange(6.0).view(2, 3)}}


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("says_length", [True, False])
def test_a_torch_file(server: Server, ranges: bool, says_length: bool) -> None:
    server.ranges, server.says_length = ranges, says_length
    torch.save(a_checkpoint(), server.folder / "epoch=3 of run.ckpt")

    found = open_checkpoint(f"{server.url}/epoch=3 of run.ckpt", control())

    assert found["epoch"] == 3
    assert torch.equal(found["state_dict"]["weight"], a_checkpoint()["state_dict"]["weight"])


@pytest.mark.parametrize("ranges", [True, False])
def test_safetensors_behind_a_signed_address(server: Server, ranges: bool) -> None:
    server.ranges = ranges
    weights = {"a": torch.randn(1000, 1000), "b": torch.randn(3)}
    save_file(weights, server.folder / "model.safetensors")

    found = open_checkpoint(f"{server.url}/model.safetensors?signature=a/b&expires=1", control())["state_dict"]

    for name, value in weights.items():
        assert isinstance(found[name], StoredTensor)
        assert torch.equal(found[name].read(), value)
    whole = [part for _, part in server.asked if part is None]
    assert whole == []


def train(path: Path | str, **settings: Any) -> Callable[[int], Any]:
    """Train for epochs of two steps, and save; or resume."""

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        with quiet():
            trainer = make_trainer("zero3", max_epochs=settings.get("epochs", 1), limit_train_batches=2)
            model = BoringModel()
            trainer.fit(model, ckpt_path=settings.get("ckpt_path"))
            if "ckpt_path" not in settings:
                trainer.save_checkpoint(path)
        return trainer.global_step

    return run


@pytest.mark.parametrize("ranges", [True, False])
def test_a_run_of_two_ranks_goes_on_from_a_directory(server: Server, ranges: bool) -> None:
    server.ranges = ranges
    directory = server.folder / "step=2.ckpt"
    run_world(2, train(directory))
    url = f"{server.url}/step=2.ckpt"

    assert is_checkpoint_directory_at(url)
    assert verify_checkpoint(url) == []
    expected, found = load_full_state_dict(directory), load_full_state_dict(url)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(BoringModel.load_from_checkpoint(url).layer.weight, expected["layer.weight"])
    consolidate_checkpoint(directory, server.folder / "expected.ckpt")
    consolidate_checkpoint(url, server.folder / "found.ckpt")
    assert (server.folder / "found.ckpt").read_bytes() == (server.folder / "expected.ckpt").read_bytes()
    assert run_world(2, train(directory, ckpt_path=url, epochs=2)) == [4, 4]


def test_a_run_goes_on_from_a_file_as_it_does_without_a_strategy(server: Server) -> None:
    with quiet():
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, limit_train_batches=1, logger=False, enable_checkpointing=False
        )
        trainer.fit(BoringModel())
        trainer.save_checkpoint(server.folder / "plain.ckpt")

    assert run_world(2, train("", ckpt_path=f"{server.url}/plain.ckpt", epochs=2)) == [3, 3]


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_nothing_there(server: Server) -> None:
    url = f"{server.url}/run/last.ckpt"
    with pytest.raises(CheckpointError, match=r"no checkpoint at 'http://.*/run/last\.ckpt'.*server does not let us"):
        open_checkpoint(url, control())
    assert not is_checkpoint_directory_at(url)


def test_a_server_in_trouble(server: Server) -> None:
    server.statuses["/x.ckpt"] = 500
    with pytest.raises(CheckpointError, match=r"x\.ckpt' cannot be read: the server says HTTP Error 500"):
        open_checkpoint(f"{server.url}/x.ckpt", control())


def test_no_server() -> None:
    with serving(Path()) as server:
        url = server.url
    with pytest.raises(CheckpointError, match=r"cannot be reached: .*refused"):
        open_checkpoint(f"{url}/x.ckpt", control())


def test_a_connection_that_breaks_off(server: Server) -> None:
    torch.save(a_checkpoint(), server.folder / "x.ckpt")
    server.missing = 7
    with pytest.raises(CheckpointError, match=r"x\.ckpt' ended at byte \d+ of \d+"):
        open_checkpoint(f"{server.url}/x.ckpt", control())


def test_a_file_that_is_replaced_while_it_is_read(server: Server) -> None:
    (server.folder / "x.bin").write_bytes(b"a" * 100)
    files = open_folder(server.url)
    assert files.size("x.bin") == 100
    server.version = 2
    with pytest.raises(CheckpointError, match=r"x\.bin' was replaced"):
        read_bytes(files, "x.bin", 0, 10)


def test_an_empty_file(server: Server) -> None:
    (server.folder / "x.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x\.ckpt' is no checkpoint: the file is empty"):
        open_checkpoint(f"{server.url}/x.ckpt", control())


def test_a_state_dict_that_could_run_code_is_refused(server: Server) -> None:
    torch.save({"state_dict": {"weight": torch.ones(1)}, "object": nn.Linear(1, 1)}, server.folder / "x.ckpt")
    with pytest.raises(CheckpointError, match="could run code"):
        open_checkpoint(f"{server.url}/x.ckpt", control())
    assert "object" in open_checkpoint(f"{server.url}/x.ckpt", control(), weights_only=False)
