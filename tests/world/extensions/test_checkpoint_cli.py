"""``lightning-zero inspect`` and ``lightning-zero consolidate``, as a person at a terminal sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_zero.checkpoint import save_checkpoint_directory
from lightning_zero.checkpoint.consolidated import save_consolidated_file
from lightning_zero.cli import main
from lightning_zero.errors import readable_size
from tests.helpers.samples import checkpoint, control, end_to_end, parameters
from tests.helpers.script import run_forked
from tests.helpers.world import run_world

PLAN = {
    "world_size": 3,
    "parameters": "sharded",
    "gradients": "sharded",
    "optimizer": "sharded",
    "precision": "bf16-mixed",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same checkpoint as a directory (``folder``) and as a file (``file.ckpt``)."""
    folder = tmp_path_factory.mktemp("tools")

    def rank(_: int) -> None:
        ranks = control()
        whole = checkpoint(7, end_to_end, ranks)
        whole["lightning_zero"] = {"excluded_frozen": ["base.weight", "base.bias"]}
        whole["pytorch-lightning_version"] = "2.6.6"
        whole["hyper_parameters"] = {"dim": 32}
        shard = whole["state_dict"]["conv.weight"]
        whole["state_dict"]["tied"] = shard.detach()
        save_checkpoint_directory(whole, folder / "folder", ranks, plan_summary=PLAN)
        save_consolidated_file(whole, folder / "file.ckpt", ranks, plan_summary=PLAN)

    run_world(3, rank, timeout=30)
    return folder


@pytest.fixture
def damaged(source: Path, tmp_path: Path) -> Path:
    """A copy of the directory, to be changed."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (source / "folder").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def code_of(*arguments: str | Path) -> int:
    """The exit code of ``lightning-zero``."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return stopped.code  # type: ignore[return-value]
    return 0


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------------------- inspect


@pytest.mark.parametrize("name", ["folder", "file.ckpt"])
def test_inspect_prints_what_is_inside(source: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert code_of("inspect", source / name) == 0

    printed = capsys.readouterr()
    lines = {line.strip() for line in printed.out.splitlines()}
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines if "  " in line)
    assert f"Checkpoint {source / name}" in lines
    assert facts["saved at"] == "epoch 7, global step 70"
    assert facts["world size"] == "3"
    assert facts["placement"] == "stage 3, parameters sharded, gradients sharded, optimizer sharded"
    assert facts["precision"] == "bf16-mixed"
    assert "lightning 2.6.6" in facts["written by"]
    assert facts["left out"] == "2 frozen parameters: base.weight, base.bias"
    assert facts["hyperparameters"] == "dim"
    # 78 + 1 + 120 + 12 of float32, 36 of float16, 1 of float64, 37 of bfloat16
    dtypes = "(float32: 211, float16: 36, float64: 1, bfloat16: 37)"
    assert facts["weights"] == f"285 elements in 8 tensors, 998 B {dtypes}, 1 tied to others"
    assert re.search(r"group 0 +7 parameters, lr 0.7, betas \(0.9, 0.99\)\n", printed.out)
    assert facts["state step"] == "7 elements in 7 tensors, 28 B (float32)"
    assert "Optimizer 1" in lines
    assert "Verified: every file is whole." in lines
    for path in [source / name] if name != "folder" else (source / name).iterdir():
        assert facts[path.name] == readable_size(path.stat().st_size)
    assert not printed.err


def test_inspect_lists_the_weights_on_request(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(source / "folder"), "--tensors", "--no-verify"])

    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["conv.weight", "float32", "(3,", "2,", "4,", "5)", "480", "B"] in rows
    assert ["_extra_state", "dict"] in rows
    assert "Verified" not in printed


def test_inspect_names_a_file_with_a_flipped_bit(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the elements of the conv weight, which all three ranks hold a part of."""
    record = json.loads((damaged / "zero.json").read_text())["content"]
    start, _, number, offset, _ = record["items"]["state_dict.conv.weight"]["chunks"][0]
    name = list(record["files"])[number]
    flip(damaged / name, offset)

    assert start == 0
    assert code_of("inspect", damaged) == 1
    told = capsys.readouterr().out.partition("Damaged:")[2]
    assert name in told
    assert "state_dict.conv.weight" in told
    assert code_of("inspect", damaged, "--no-verify") == 0


def test_inspect_of_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.ckpt").write_text("Dear diary")
    (tmp_path / "empty").mkdir()
    for name in ("text.ckpt", "empty", "missing"):
        assert code_of("inspect", tmp_path / name) == 1
        printed = capsys.readouterr()
        assert str(tmp_path / name) in printed.err
        assert not printed.out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.ckpt", b"hello\n", "no file of torch begins with b'hell'"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid", "no safetensors file"),
        ("a.ckpt", b"", "no file of torch begins with b''"),
        ("a.ckpt", b"\x93NUMPY\x01\x00", "no file of torch begins with b'\\x93NUM'"),
    ],
)
def test_inspect_says_what_a_file_is_in_place_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert code_of("inspect", tmp_path / name) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def runs(source: Path, tmp_path: Path) -> Path:
    """A folder of checkpoints, as a few runs leave it."""
    nested = tmp_path / "runs" / "version_0" / "checkpoints"
    (nested / "deep" / "deeper").mkdir(parents=True)
    (nested / "last.ckpt").symlink_to(source / "folder")
    (nested.parent.parent / "one.ckpt").symlink_to(source / "file.ckpt")
    (nested.parent / "hparams.yaml").write_text("width: 3")
    (nested / "deep" / "deeper" / "far.ckpt").symlink_to(source / "file.ckpt")
    return tmp_path / "runs"


def test_a_folder_of_checkpoints_is_an_error_that_names_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["inspect", runs], ["consolidate", runs, runs.parent / "out.ckpt"]):
        assert code_of(*arguments) == 1
        told = capsys.readouterr().err
        assert "of which one is needed: 'one.ckpt', 'version_0/checkpoints/last.ckpt'." in told


def test_a_missing_file_is_named_once(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(path.name for path in damaged.glob("*.distcp"))
    (damaged / name).unlink()
    assert code_of("inspect", damaged) == 1
    printed = capsys.readouterr()
    assert name in printed.err
    assert name not in printed.out


def test_inspect_of_safetensors_says_that_there_are_no_checksums(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert code_of("consolidate", tmp_path / "w.pt", tmp_path / "hf") == 0
    assert code_of("inspect", tmp_path / "hf") == 3
    assert f"cannot be verified: changed bytes would not be noticed, without checksums for '{tmp_path / 'hf'}'" in (
        printed := capsys.readouterr().out
    )
    assert "Verified" not in printed
    assert code_of("inspect", tmp_path / "hf", "--no-verify") == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (15 * 10**8, "1.50 GB")],
)
def test_readable_sizes(nbytes: int, text: str) -> None:
    assert readable_size(nbytes) == text


# --------------------------------------------------------------------------------------------------------- consolidate


def test_consolidate_writes_a_file_and_says_so(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("consolidate", source / "folder", tmp_path / "c.ckpt", "--dtype", "bf16") == 0

    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'c.ckpt'}\n"
    assert printed.err.startswith("lightning-zero consolidate: warning: ")
    assert "2 frozen parameters (base.weight, ...)" in printed.err
    loaded = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert torch.equal(loaded["state_dict"]["vector"], parameters(7)["vector"].bfloat16())
    assert loaded["state_dict"]["conv.weight"].dtype == torch.bfloat16
    assert "optimizer_states" in loaded


def test_consolidate_takes_every_option(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--format", "safetensors", "--max-shard-size", "400B", "--prefix", "conv", "--weights-only"]
    assert code_of("consolidate", source / "folder", tmp_path / "hf", *options) == 0

    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(written) == 4
    assert all(path.parent == tmp_path / "hf" for path in written)
    assert torch.equal(load_file(written[1])["weight"], parameters(7)["conv.weight"])
    assert code_of("consolidate", source / "folder", tmp_path / "hf", *options) == 2
    assert "exists: write to another place, or delete it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "DIR"),
        (["inspect", "a", "--nonsense"], "--nonsense"),
        (["inspect", "a", "--tensros"], "unrecognized arguments: --tensros"),
        (["inspect", "a", "--json"], "--json does not exist any more: in Python, `verify_checkpoint`"),
        (["consolidate", "a", "b", "--overwrite"], "--overwrite does not exist any more: write to another name"),
        (["fit", "--help-all"], "--help-all does not exist any more: --print_config lists every option"),
        (["consolidate", "a", "b", "--max-size=5G"], "--max-size=5G"),
        (["consolidate", "a"], "OUT"),
        (["consolidate", "a", "b.ckpt", "--format", "zip"], "format must be one of 'ckpt', 'safetensors', got 'zip'"),
        (["consolidate", "a", "b", "--format", "peft"], "load_from_checkpoint(MyModule, path)"),
        (["consolidate", "a", "b", "--max-shard-size", "5 parsecs"], "--max-shard-size"),
        (["consolidate", "a", "b", "--max-shard-size", "5"], "5 would be so many bytes. Did you mean 5GB?"),
        (["consolidate", "a", "b.ckpt", "--dtype", "int8"], "bfloat16 (bf16), float16 (fp16) or float32 (fp32)"),
        (["consolidate", "a", "b.ckpt", "--prefix", "model."], "prefix"),
        (["consolidate", "a", "b.ckpt", "--format", "safetensors"], "contradicts the name 'b.ckpt'"),
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert code_of(*arguments) == 2
    assert message in capsys.readouterr().err.partition("error:")[2]


@pytest.mark.parametrize("command", ["inspect", "consolidate"])
def test_help_says_what_a_command_takes(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert code_of(command, "--help") == 0
    told = capsys.readouterr().out
    assert f"usage: lightning-zero {command}" in told
    assert all(option in told for option in {"inspect": ["--no-verify", "--tensors"]}.get(command, ["--dtype", "5GB"]))


def test_the_exit_code_reaches_the_shell(tmp_path: Path) -> None:
    _, stderr = run_forked(["-m", "lightning_zero", "inspect", "missing.ckpt"], cwd=tmp_path, code=1)
    assert stderr.startswith("lightning-zero inspect: error: ")
    assert "Traceback" not in stderr
