"""No two streams use the same memory in no order; and every event that the package marks or waits for is needed.

Each setting is trained once, on a simulated device (``simulated.py``). What follows is asked of its trace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
import torch

import lightning_zero
from lightning_zero import ActivationPolicy, Compression, HostOffload
from lightning_zero.comm.groups import RANKS_PER_HOST
from tests.helpers.world import run_world
from tests.thorough.races.play import Played, Setting, play
from tests.thorough.races.trace import Item, find_races, sites

MIXED: Final = "bf16-mixed"
UNITS = {"activations": ActivationPolicy(checkpointing="units")}
SAVED = {"activations": ActivationPolicy(offload=True, min_kib=0)}
ROUNDED = Compression(weights="int8", gradients="int4", error_feedback=True)
HOST = {"offload": HostOffload()}
UNPINNED = {"offload": HostOffload(pin_mib=0)}
ALL_ON_HOST = {"offload": HostOffload(parameters=True)}
ALL_UNPINNED = {"offload": HostOffload(parameters=True, pin_mib=0)}

SETTINGS = {
    "stage 1": Setting(stage=1),
    "stage 1, mixed, accumulating": Setting(stage=1, precision=MIXED, accumulate=2, clip=0.5),
    "stage 1, looking": Setting(stage=1, precision=MIXED, twist="look"),
    "stage 1, host": Setting(stage=1, accumulate=2, strategy=HOST),
    "stage 2": Setting(stage=2),
    "stage 2, mixed, accumulating": Setting(stage=2, precision=MIXED, accumulate=2, clip=0.5),
    "stage 2, host": Setting(stage=2, strategy=HOST),
    "stage 2, host, mixed, accumulating": Setting(stage=2, precision=MIXED, accumulate=2, clip=0.5, strategy=UNPINNED),
    "stage 2, host, mixed, looking": Setting(stage=2, precision=MIXED, twist="look", strategy=UNPINNED),
    "stage 2, saved on host": Setting(stage=2, strategy=SAVED),
    "stage 3": Setting(stage=3, accumulate=2, clip=0.5),
    "stage 3, prefetch 0": Setting(stage=3, strategy={"prefetch": 0}),
    "stage 3, prefetch 2": Setting(stage=3, strategy={"prefetch": 2}),
    "stage 3, mixed, accumulating": Setting(stage=3, precision=MIXED, accumulate=2, clip=0.5),
    "stage 3, Muon": Setting(stage=3, optimizer=torch.optim.Muon),
    "stage 3, looking": Setting(stage=3, twist="look"),
    "stage 3, skipping": Setting(stage=3, twist="skip", accumulate=2),
    "stage 3, skipping, mixed": Setting(stage=3, precision=MIXED, twist="skip", accumulate=2),
    "stage 3, keeping": Setting(stage=3, twist="keep", accumulate=2),
    "stage 3, hidden": Setting(stage=3, twist="hidden"),
    "stage 3, recomputing": Setting(stage=3, strategy=UNITS),
    "stage 3, recomputing, prefetch 0": Setting(stage=3, strategy={**UNITS, "prefetch": 0}),
    "stage 3, host": Setting(stage=3, strategy=HOST),
    "stage 3, host, looking": Setting(stage=3, twist="look", strategy=HOST),
    "stage 3, host, mixed, looking": Setting(stage=3, precision=MIXED, twist="look", strategy=HOST),
    "stage 3, all on host": Setting(stage=3, strategy=ALL_ON_HOST),
    "stage 3, all on host, looking": Setting(stage=3, twist="look", strategy=ALL_UNPINNED),
    "stage 3, all on host, mixed": Setting(stage=3, precision=MIXED, clip=0.5, strategy=ALL_ON_HOST),
    "stage 3, all on host, prefetch 0": Setting(stage=3, precision=MIXED, strategy={**ALL_ON_HOST, "prefetch": 0}),
    "stage 3, all on host, skipping": Setting(stage=3, twist="skip", accumulate=2, strategy=ALL_UNPINNED),
    "stage 3, saved on host": Setting(stage=3, strategy=SAVED),
    "stage 3, saved on host, quick": Setting(stage=3, quick=True, strategy=SAVED),
    "stage 3, saved on host, aside": Setting(stage=3, twist="aside", strategy=SAVED),
    "stage 2, passing": Setting(stage=2, accumulate=2, passes=True),
    "stage 3, passing": Setting(stage=3, accumulate=2, passes=True),
    "stage 3, passing, mixed, looking": Setting(stage=3, precision=MIXED, twist="look", passes=True),
    "stage 3, passing, host": Setting(stage=3, precision=MIXED, strategy=HOST, passes=True),
    "stage 2, files": Setting(stage=2, files=True),
    "stage 3, files": Setting(stage=3, files=True),
    "stage 3, files, mixed": Setting(stage=3, precision=MIXED, files=True),
}
ALONE = {
    "alone, stage 2, host": Setting(stage=2, precision=MIXED, accumulate=2, strategy=HOST),
    "alone, stage 3": Setting(stage=3, accumulate=2),
    "alone, stage 3, looking": Setting(stage=3, precision=MIXED, twist="look"),
    "alone, stage 3, all on host": Setting(stage=3, strategy=ALL_ON_HOST),
}
GROUPS = {
    "stage 1, in groups": Setting(stage=1, accumulate=2, strategy={"shard_within": 2}),
    "stage 3, in groups, mixed": Setting(stage=3, precision=MIXED, accumulate=2, strategy={"shard_within": 2}),
    "stage 1, in groups, host": Setting(stage=1, strategy={"shard_within": 2, **HOST}),
    "stage 2, in groups, host, mixed": Setting(
        stage=2, precision=MIXED, accumulate=2, strategy={"shard_within": 2, **UNPINNED}
    ),
    "stage 3, in groups, host": Setting(stage=3, accumulate=2, clip=0.5, strategy={"shard_within": 2, **HOST}),
    "stage 3, in groups, all on host, skipping": Setting(
        stage=3, twist="skip", accumulate=2, strategy={"shard_within": 2, **ALL_ON_HOST}
    ),
    "stage 3, in groups, files": Setting(stage=3, accumulate=2, files=True, strategy={"shard_within": 2}),
}
FED = Compression(gradients="int4", error_feedback=True)
KEPT = {"secondary_shards": True}
HOSTS = {  # two of two ranks
    "stage 1, two hops, rounded": Setting(stage=1, precision=MIXED, strategy={"compression": ROUNDED}),
    "stage 2, two hops, rounded": Setting(stage=2, accumulate=2, strategy={"compression": FED}),
    "stage 3, kept": Setting(stage=3, accumulate=2, clip=0.5, strategy=KEPT),
    "stage 3, kept, Muon": Setting(stage=3, optimizer=torch.optim.Muon, strategy=KEPT),
    "stage 3, kept, looking": Setting(stage=3, twist="look", strategy=KEPT),
    "stage 3, kept, rounded": Setting(stage=3, accumulate=2, strategy={**KEPT, "compression": ROUNDED}),
    "stage 3, kept, on host": Setting(stage=3, precision=MIXED, strategy={**KEPT, **ALL_ON_HOST}),
    "stage 2, in groups, rounded": Setting(stage=2, strategy={"shard_within": 2, "compression": FED}),
}
APART = {  # two of one rank
    "stage 1, rounded": Setting(stage=1, precision=MIXED, strategy={"compression": ROUNDED}),
    "stage 2, rounded": Setting(stage=2, strategy={"compression": FED}),
    "stage 3, rounded": Setting(stage=3, accumulate=2, strategy={"compression": ROUNDED}),
}


# Without one of these nothing races in the settings above. Why it is there all the same:
_HANDS_OVER = "the thread hands over an event, and who waits for that is behind the thread too"
_ARRIVES = "wait in comm/collectives.py wait: self._streams.wait(self._event) < "
_HOPS = "both hops, and the arithmetic behind them, are on one stream"
_IN_ORDER = "what is waited for is on the same stream"
SPARE = {
    "result in offload/transfers.py order: self._event = job.result() < engine/weights.py unit_stepped": _HANDS_OVER,
    "result in offload/transfers.py settle: self._last.exception() < offload/transfers.py settle < "
    "engine/engine.py before_optimizer_step": _HANDS_OVER,
    "result in offload/transfers.py settle: self._last.exception() < offload/transfers.py close": _HANDS_OVER,
    "result in extensions/nvme/store.py forget: buffer.job.exception()": "what is read is in a file, not in memory",
    "synchronize in offload/host.py release: torch.cuda.synchronize(self._device)  # copies from and to it may be on "
    "their way": "who calls it has waited for every copy itself",
    "synchronize in offload/transfers.py wait: self._event.synchronize() < engine/reducer.py settle < "
    "engine/reducer.py close": "of what the backward did not use; the stepper waits for all transfers again",
    _ARRIVES + "extensions/hops.py within": _HOPS,
    _ARRIVES + "extensions/hops.py between": _HOPS,
    _ARRIVES + "comm/native.py followed": _HOPS,
    _ARRIVES + "comm/native.py average_across": _IN_ORDER,
    "wait in comm/native.py average_across: with self.streams.reducing():": "where gradients are not reduced in the "
    "dtype of their sums, memory for these was taken since then, on the stream that computes",
    "wait in engine/pool.py _leave: self._streams.hand_back(buffer.home, buffer.free)": "the stream that takes memory "
    "has waited for all that was done with a buffer, unless user code computes on several",
    _ARRIVES + "comm/native.py reduce": _IN_ORDER,
    _ARRIVES + "comm/native.py gather": _IN_ORDER,
}

# What the package marks and waits for, in its source. Not what measures times, and not what copies for a checkpoint.
CALLS = re.compile(r"(streams?|_out|_back)\.(mark|wait|gathering|reducing|transferring)\(|\.synchronize\(|\.query\(")
ELSEWHERE = (
    "comm/streams.py",
    "extensions/monitors/usage.py",
    "extensions/tune/measurement.py",
    "checkpoint/background.py",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    """What one rank of each setting recorded."""
    folder = str(tmp_path_factory.mktemp("files"))

    def play_all(rank: int, settings: dict[str, Setting]) -> dict[str, Played]:
        found = {name: play(setting, folder) for name, setting in settings.items()}
        return found if rank == 0 else {}

    found: dict[str, Played] = {}
    for world_size, settings, ranks in (
        (2, SETTINGS, ""),
        (1, ALONE, ""),
        (4, GROUPS, ""),
        (4, HOSTS, "2"),
        (2, APART, "1"),
    ):
        environment = {"LIGHTNING_ZERO_SHARED_MEMORY": "0", RANKS_PER_HOST: ranks}
        found.update(run_world(world_size, play_all, settings, timeout=200, environment=environment)[0])
    return found


@pytest.mark.parametrize("name", [*SETTINGS, *ALONE, *GROUPS, *HOSTS, *APART])
def test_nothing_races(name: str, played: dict[str, Played]) -> None:
    found = played[name]
    assert len(found.trace) > 500
    assert not found.mixed
    assert not find_races(found.trace)


def test_each_event_is_needed(played: dict[str, Played]) -> None:
    """Taken out of a trace, each lets something race in some setting; new ones that do not have to say why."""
    traces = [found.trace for found in played.values()]
    places = {site for trace in traces for site in sites(trace)}
    spare = {site for site in places if not _races_without(site, traces)}
    assert spare == SPARE.keys()


def test_each_event_is_played(played: dict[str, Played]) -> None:
    """Every line of the package that marks an event, or waits for one, is in some trace."""
    seen = {site.partition(" < ")[0] for found in played.values() for site in sites(found.trace)}
    lines = {tuple(re.split(r" in | \S+: ", site, maxsplit=2)[1:]) for site in seen}
    root = Path(lightning_zero.__file__).parent
    missing = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for line in path.read_text().splitlines() if not name.startswith(ELSEWHERE) else ():
            if CALLS.search(line) and not any(file == name and text.startswith(line.strip()) for file, text in lines):
                missing.append(f"{name}: {line.strip()}")
    assert not missing


def _races_without(site: str, traces: Sequence[Sequence[Item]]) -> bool:
    return any(find_races(trace, [site], most=1) for trace in traces if site in sites(trace))
