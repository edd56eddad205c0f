"""``lightning-zero tune`` without its runs: what is tried and chosen, and the configuration that is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_zero.extensions import tune
from lightning_zero.extensions.tune.children import Children, _reason
from lightning_zero.extensions.tune.edits import batch_keys, configured, edited, settings_of
from lightning_zero.extensions.tune.search import Row, Search, Settings

GIVEN = Settings(3, batch_size=4, accumulate=4)
MB = 10**6
PLANNED = {"zero1": 60 * MB, "zero2": 40 * MB, "zero3": 20 * MB, "zero3_offload": 10 * MB}


def facts(settings: Settings, **more: Any) -> Mapping[str, Any]:
    """As a run in which there is a unit to prefetch, or a bucket that may be smaller, says them."""
    found = {"stage": settings.stage, "offload": settings.offload, "room": 1000 * MB, "planned": PLANNED}
    own = {"prefetch": settings.prefetch or 1, "units": 3} if settings.stage == 3 else {"bucket_mib": 40.0}
    return {**found, **own, "most_bucket_mib": 40.0, **more}


def searched(
    seconds: Callable[[Settings], float], given: Settings = GIVEN, most: int = 8, offload: bool = False, **more: Any
) -> Search:
    """A search among runs that take so long; 0: one that runs out of memory."""

    def run(settings: Settings) -> Row:
        time, samples = seconds(settings), (settings.batch_size or 0) * settings.accumulate
        if not time:
            return Row(settings, facts=facts(settings, **more), failure="MemoryError", of_memory=True)
        return Row(settings, time, samples, 100 * MB, facts(settings, **more))

    search = Search(given, run, most, offload)
    search.all()
    return search


def names(search: Search) -> list[str]:
    return [row.settings.beside(GIVEN) or "as given" for row in search.rows]


def test_the_order_is_stages_then_one_setting_after_the_other_of_the_best() -> None:
    search = searched(lambda s: 2.0 if s.stage != 2 else 1.0 / (s.batch_size or 1) + (s.bucket_mib is not None))
    assert names(search) == [
        "as given",
        "zero1",
        "zero2",
        "zero2, batch_size 8, accumulate 2",
        "zero2, batch_size 16, accumulate 1",
        "zero2, bucket_mib 10.0, batch_size 16, accumulate 1",
    ]
    assert search.best is search.rows[4]
    assert not search.untried


def test_where_larger_batches_are_slower_a_smaller_one_is_tried_and_where_gathers_take_time_prefetch() -> None:
    search = searched(lambda s: (s.stage != 3) + (s.batch_size or 0) / 4 + (2.0 if s.prefetch == 0 else 1.0))
    assert names(search)[3:] == [
        "batch_size 8, accumulate 2",
        "batch_size 2, accumulate 8",
        "prefetch 2, batch_size 2, accumulate 8",
        "prefetch 0, batch_size 2, accumulate 8",
    ]


def test_runs_are_counted_and_what_they_were_too_few_for_is_named() -> None:
    search = searched(lambda s: 1.0, most=2, offload=True)
    assert names(search) == ["as given", "zero1"]
    assert search.untried == [
        *("zero2", "batch_size 8, accumulate 2", "batch_size 2, accumulate 8", "prefetch 2", "prefetch 0"),
        "zero3_offload",
    ]


def test_of_equal_rates_the_one_with_less_memory_is_best_and_of_equals_the_first() -> None:
    rows = itertools.chain([(1.0, 50), (0.99, 60), (0.985, 50), (0.5, 0), (1.0, 40)], itertools.repeat((2.0, 1)))

    def run(settings: Settings) -> Row:
        seconds, peak = next(rows)
        return Row(settings, seconds, 16, peak, facts(settings), failure="" if peak else "ValueError")

    search = Search(GIVEN, run, 8, offload=False)
    search.all()
    assert [row.peak for row in search.rows][:5] == [50, 60, 50, 0, 40]
    assert search.best is search.rows[4]
    search.rows.pop(4)
    assert search.best is search.rows[0]


def test_what_cannot_fit_is_not_run() -> None:
    """zero3 takes 100 MB with a plan of 20: zero1, whose plan takes 60, would take 140, and 0.9 * 150 are allowed."""
    search = searched(lambda s: 1.0, room=150 * MB)
    (row,) = (row for row in search.rows if not row.started)
    assert row.settings.stage == 1
    assert row.failure == "would need 140 MB, and there are 150 MB"
    assert names(search)[-1] == "activations units", "memory is short"


def test_a_stage_that_needs_no_less_than_one_that_failed_is_not_run() -> None:
    search = searched(lambda s: float(s.stage == 3), GIVEN._replace(stage=2))
    failures = [(row.settings.stage, row.started) for row in search.rows if row.failure]
    assert failures == [(2, True), (1, False)]
    assert search.rows[1].failure == "its plan takes 60 MB, and that of zero2, which ran out of memory, 40 MB"
    assert search.best is not None
    assert search.best.settings.stage == 3


@pytest.mark.parametrize(
    ("fits", "last"),
    [
        (lambda s: s.batch_size == 2, "batch_size 2, accumulate 8"),
        (lambda s: s.activations, "activations units"),
        (lambda s: s.offload, "zero3_offload"),
        (lambda s: s.offload and s.activations, "zero3_offload, activations units"),
        (lambda s: False, "zero3_offload, activations units"),
    ],
)
def test_where_no_stage_fits_what_needs_less_is_tried(fits: Callable[[Settings], bool], last: str) -> None:
    search = searched(lambda s: float(fits(s)), planned={})
    found = names(search)
    assert found[1:3] == ["zero1", "zero2"]
    assert last in found
    assert (search.best is None) == (last == found[-1] and not fits(search.rows[-1].settings))
    if search.best:
        assert search.best.settings.beside(GIVEN) == last


@pytest.mark.parametrize(("own", "tried"), [(True, 2), (False, 7)])
def test_an_error_of_the_program_is_not_tried_again_with_all_settings(own: bool, tried: int) -> None:
    def run(settings: Settings) -> Row:
        return Row(settings, facts=facts(settings), failure="KeyError: 'x'", own=own)

    search = Search(GIVEN, run, 8, offload=True)
    search.all()
    assert len(search.rows) == tried
    assert search.best is None


def test_another_batch_than_asked_for_is_another_training() -> None:
    """As where the key is not what sets the size of batches."""

    def run(settings: Settings) -> Row:
        return Row(settings, 0.1 * settings.accumulate, 4 * settings.accumulate, 1, facts(settings))

    search = Search(GIVEN, run, 8, offload=False)
    search.all()
    (failed, _) = (row for row in search.rows if row.failure)
    assert failed.failure == "takes 8 samples a step, not 16: that would be another training"


def test_one_that_does_not_start_is_not_started_in_other_ways() -> None:
    def run(settings: Settings) -> Row:
        return Row(settings, failure="ImportError")

    search = Search(GIVEN, run, 8, offload=False)
    search.all()
    assert len(search.rows) == 1


def test_the_stage_that_a_run_chooses_is_tried_once() -> None:
    def run(settings: Settings) -> Row:
        return Row(settings, 1.0, 16, 1, facts(settings._replace(stage=settings.stage or 2)))

    search = Search(Settings(None), run, 8, offload=False)
    search.all()
    assert [row.settings.stage for row in search.rows][:3] == [2, 1, 3]


# ------------------------------------------------------------------------------------------------------ configurations

YAML = """\
# A run.
trainer:
  # {comment}
  strategy: {strategy}  # of three

  devices: 2
data:
  init_args: {{batch_size: 4, path: here}}  # of a rank
"""
FSDP = "{class_path: lightning.pytorch.strategies.FSDPStrategy, init_args: {cpu_offload: true}}"
NESTED = """
    class_path: lightning_zero.ZeroStrategy
    init_args:
      # of data
      stage: 3
      offload:
        class_path: lightning_zero.HostOffload
        init_args: {parameters: true}"""


@pytest.mark.parametrize(
    ("strategy", "settings", "expected"),
    [
        ("zero3", {"stage": 1}, "zero1"),
        ("zero3_offload", {"stage": 1, "offload": False}, "zero1"),
        ("zero3", {"offload": True}, "zero3_offload"),
        ("zero", {"stage": 2}, "zero2"),
        (
            "zero3_offload",
            {"prefetch": 2},
            {"class_path": "lightning_zero.zero3_offload", "init_args": {"prefetch": 2}},
        ),
        ("ddp", {"stage": 2}, {"class_path": "lightning_zero.zero2"}),
        (FSDP, {"stage": 2}, {"class_path": "lightning_zero.zero2"}),
        ("", {"stage": 2}, {"class_path": "lightning_zero.zero2"}),
        (
            "{class_path: zero2, init_args: {bucket_mib: 3}}",
            {"stage": 1, "activations": True},
            {"class_path": "lightning_zero.zero1", "init_args": {"bucket_mib": 3, "activations": "units"}},
        ),
        (
            NESTED,
            {"stage": 1, "offload": False},
            {"class_path": "lightning_zero.ZeroStrategy", "init_args": {"stage": 1, "offload": None}},
        ),
        (
            NESTED,
            {"stage": 2},
            {"class_path": "lightning_zero.ZeroStrategy", "init_args": {"stage": 2, "offload": "cpu"}},
        ),
    ],
)
def test_only_what_is_tuned_differs(strategy: str, settings: dict[str, Any], expected: Any) -> None:
    text = YAML.format(strategy=strategy, comment="Which stage.")
    config = yaml.safe_load(text)
    (key,) = batch_keys(config["data"])
    given = settings_of(config, key)
    chosen = given._replace(**settings, batch_size=2, accumulate=2)
    found, alike = edited(text, configured(config, given, chosen, key))
    config["trainer"] |= {"strategy": expected, "accumulate_grad_batches": 2}
    config["data"]["init_args"]["batch_size"] = 2
    assert yaml.safe_load(found) == config
    assert alike
    for line in ("# A run.", "# Which stage.", "# of three", "# of a rank"):
        assert line in found
    assert settings_of(config, key)[:2] == chosen[:2], "a second search begins where this one ended"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("zero3", Settings(3, accumulate=1)),
        ("zero2_offload", Settings(2, offload=True)),
        ("zero", Settings(None)),
        ("ddp", Settings(None)),
        (
            "{class_path: lightning_zero.zero1, init_args: {bucket_mib: 5, activations: units}}",
            Settings(1, bucket_mib=5, activations=True),
        ),
        ("{class_path: lightning_zero.ZeroStrategy, init_args: {stage: '2', prefetch: 0}}", Settings(2, prefetch=0)),
        ("{class_path: lightning_zero.zero3_offload, init_args: {offload: null}}", Settings(3)),
        (FSDP, Settings(None)),
    ],
)
def test_what_a_configuration_says(strategy: str, expected: Settings) -> None:
    assert settings_of({"trainer": {"strategy": yaml.safe_load(strategy)}}, None) == expected


def test_where_values_are_shared_comments_are_lost_and_said_to_be() -> None:
    text = "size: &size 4  # of all\ntrainer: {devices: 2}\ndata:\n  batch_size: *size\n"
    config = yaml.safe_load(text)
    found, alike = edited(text, {**config, "data": {"batch_size": 2}})
    assert yaml.safe_load(found) == {"size": 4, "trainer": {"devices": 2}, "data": {"batch_size": 2}}
    assert not alike


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def _run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(YAML.format(strategy="zero3", comment=""))


def faked(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Settings], float]) -> list[Any]:
    """Runs that take so long, 0 for those that fail; the configurations that they got."""
    got = []

    def run(self: Children, settings: Settings, text: str) -> Row:
        got.append(yaml.safe_load(text))
        self.logs.append("a warning\nRuntimeError: of the model\n")
        time = seconds(settings)
        return Row(settings, time, 8, 1, facts(settings), failure="" if time else "RuntimeError: of the model")

    monkeypatch.setattr(Children, "run", run)
    return got


@pytest.mark.usefixtures("_run_yaml")
def test_the_best_is_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    got = faked(monkeypatch, lambda s: 0.5 if s.stage == 1 else 0.0 if s.stage == 2 else 1.0)
    assert tune.run(["--config=run.yaml", "--runs=3"]) == 0
    assert [one["trainer"]["strategy"] for one in got] == ["zero3", "zero1", "zero2"]
    assert yaml.safe_load(Path("tuned.yaml").read_text()) == got[1]
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["as", "given", "(zero3)", "8.0", "1,000.0", "ms", "1", "B", "1.00"]
    assert out[3].split() == ["zero1", "16.0", "500.0", "ms", "1", "B", "2.00"]
    assert out[4].split() == ["zero2", "failed", "-", "-", "-"]
    assert out[6] == "zero2: RuntimeError: of the model"
    assert out[7].startswith("Not tried, for want of runs: zero1, batch_size 2, accumulate 2; ")
    assert out[-1] == "Best: zero1. Written to tuned.yaml."


@pytest.mark.usefixtures("_run_yaml")
def test_a_failure_of_all_shows_what_the_first_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faked(monkeypatch, lambda _: 0.0)
    assert tune.run(["--config=run.yaml"]) == 1
    assert "a warning\nRuntimeError: of the model\n" in capsys.readouterr().err
    assert not Path("tuned.yaml").exists()


@pytest.mark.usefixtures("_run_yaml")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--config=missing.yaml"], 1, "missing.yaml"),
        (["--config=run.yaml", "--runs=9"], 2, "--runs is 1 to 8"),
        (["--config=run.yaml", "--output=run.yaml", "--overwrite"], 2, "run.yaml exists"),
        (["--config=run.yaml", "--output=no/tuned.yaml"], 2, "is no folder"),
        (["--config=run.yaml", "--batch-size-key=data.size"], 2, "data.size is no whole number"),
        (["--config=run.yaml", "--plot=runs.gif"], 2, "has to end in .png or .svg"),
        (["--config=run.yaml", "--", "python", "x.py", "fit", "--trainer.strategy=zero1"], 2, "would override"),
        (["--config=run.yaml", "--", "python", "x.py", "fit", "--config", "b.yaml"], 2, "--config of the command"),
        (["--config=list.yaml"], 2, "no section 'trainer'"),
        (["--config=run.yaml", "--config=list.yaml"], 2, "--config is one file"),
        (["--config=bad.yaml"], 2, "is no YAML"),
        (["--config=nodes.yaml"], 2, "on this machine alone"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    for name, text in {"list": "[1]", "bad": "a: [", "nodes": "trainer: {num_nodes: 2}"}.items():
        Path(f"{name}.yaml").write_text(text)
    try:
        found = tune.run(arguments)
    except SystemExit as end:
        found = int(str(end.code))
    assert found == code
    assert message in capsys.readouterr().err
    assert not Path("tuned.yaml").exists()


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "x\nTraceback:\n  y\ntorch.OutOfMemoryError: CUDA out of memory.\n",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("lightning_zero.errors.CommunicationError: rank 1 has gone\n[rank1]: KeyError: 'a'", "KeyError: 'a'"),
        ("errors.CommunicationError: rank 1 has gone\nbye", "errors.CommunicationError: rank 1 has gone"),
        ("train.py: error: unknown key\n", "train.py: error: unknown key"),
        ("one\n\ntwo\n", "two"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_of_a_failure(log: str, reason: str) -> None:
    assert _reason(log) == reason
