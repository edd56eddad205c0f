"""A few of the cases of ``python -m tests.thorough.fuzz.checkpoints``, and that it would notice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from lightning_zero import verify_checkpoint
from lightning_zero.extensions.inspection.verification import Verification
from tests.thorough.fuzz.checkpoints import play as playing
from tests.thorough.fuzz.checkpoints.__main__ import played, table
from tests.thorough.fuzz.checkpoints.child import bounded
from tests.thorough.fuzz.checkpoints.damages import PAYLOADS, Case, write_opcodes
from tests.thorough.fuzz.checkpoints.formats import FORMATS, fingerprint, written
from tests.thorough.fuzz.checkpoints.play import FAILED, Verdict, play

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*It cannot be verified"),
]


def test_no_damage_is_taken_for_a_whole_checkpoint_and_none_does_harm() -> None:
    verdicts = played(range(120))
    assert not [verdict for verdict in verdicts if verdict.is_failure]
    assert {verdict.kind for verdict in verdicts} == set(FORMATS)
    assert table(verdicts).splitlines()[-1].split()[0] == "all"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return written(tmp_path_factory.mktemp("samples"))


def test_what_is_not_damaged_loads_and_is_whole_where_it_can_be_known(samples: dict[str, Path]) -> None:
    for kind, path in samples.items():
        assert fingerprint(path) == fingerprint(path)
        assert verify_checkpoint(path) == []
        assert verify_checkpoint(path).is_whole == (kind in ("own", "own, first format", "torch")), kind


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
@pytest.mark.parametrize("kind", ["stock", "torch", "torch before 1.6"])
def test_no_instruction_runs_code(
    samples: dict[str, Path], tmp_path: Path, kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somewhere in a pickle; the command has more places."""
    monkeypatch.setattr("tests.thorough.fuzz.checkpoints.damages.PAYLOADS", (PAYLOADS[number],))
    monkeypatch.setattr(playing, "Case", OnlyCode)
    verdicts = [play(at, {kind: samples[kind]}, {kind: "another"}, tmp_path) for at in range(1)]
    assert not [verdict for verdict in verdicts if verdict.ending in set(FAILED) - {"different, called whole"}]


class OnlyCode(Case):
    """A case that is nothing but instructions in what describes the checkpoint."""

    def __init__(self, path: Path, draw: random.Random) -> None:
        self.told, self.is_forged, self._draw = [], True, draw
        file = path / ".metadata" if path.is_dir() else path
        if file.read_bytes().startswith(b"PK"):
            while not self._forge_archive(file, file.read_bytes()):
                pass
        else:
            self._bytes(file, write_opcodes)


@pytest.mark.parametrize(
    ("broken", "ending"),
    [
        ("verify", "different, called whole"),
        ("hang", "hung"),
        ("crash", "crashed"),
        ("memory", "crashed"),
        ("error", "other exception"),
        ("code", "ran code"),
    ],
)
def test_failures_are_noticed(
    samples: dict[str, Path], tmp_path: Path, broken: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(_: Path) -> str:
        if broken == "hang":
            time.sleep(60)
        elif broken == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif broken == "memory":
            bytearray(playing.PEAK_NBYTES + (1 << 20))
        elif broken == "error":
            raise OverflowError
        elif broken == "code":
            Path("canary").mkdir()
        return "different"

    monkeypatch.setattr(playing, "fingerprint", loaded)
    monkeypatch.setattr(playing, "verify_checkpoint", lambda _: Verification([], []))
    monkeypatch.setattr(playing, "bounded", lambda action: bounded(action, seconds=1))
    verdict = next(
        verdict
        for number in range(20)
        if (verdict := play(number, {"hub": samples["hub"]}, {"hub": "x"}, tmp_path)).ending != "different, forged"
    )
    assert isinstance(verdict, Verdict)
    assert verdict.ending == ending
    assert verdict.is_failure
