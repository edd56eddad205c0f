"""Bytes that leave a host in a step, and the time of one, where ranks are on several hosts with thin links between.

    sudo python benchmarks/network.py --hosts 2 --ranks 2 --rates 1gbit 200mbit
    python benchmarks/network.py --help

A host is a network namespace of Linux with a link of its own to a bridge, which ``tc tbf`` makes as thin as is asked
for; its ranks are processes in it. Ours are told which ranks are a host, and share memory there; what is flat, and
``shard_within``, exchanges all over gloo. The GPT of ``step_time.py`` is trained by one engine after the other. It
takes root, ``ip`` and ``tc``; without them nothing is measured. Shown are, for the host that sends most:

bytes/parameter  that left it in a step, as the link counts them, headers included
ms               of a step, the median of the rounds
of the link      the part of the step in which the link would have been busy with these bytes
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
from engines import ENGINES, SIZES, Engine, Task, fsdp2, lightning
from offload_training import numel_of
from torch.distributed.device_mesh import init_device_mesh
from worlds import Turns, World, WorldFailed

from lightning_zero import Compression, ZeroStrategy
from lightning_zero.comm.groups import RANKS_PER_HOST

_NEWNET = 0x40000000
_BRIDGE, _NAME, _LINK = (f"{kind}{os.getpid():x}" for kind in ("lzb", "lz", "lzv"))  # before ranks are forked
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[None]:
    """So many namespaces, each joined to one bridge by a link of this rate."""
    try:
        _call("ip", "link", "add", _BRIDGE, "type", "bridge")
        _call("ip", "link", "set", _BRIDGE, "up")
        for host in range(count):
            inside = ("ip", "-n", f"{_NAME}-{host}")
            _call("ip", "netns", "add", f"{_NAME}-{host}")
            _call("ip", "link", "add", f"{_LINK}-{host}", "type", "veth", "peer", "name", f"{_LINK}p{host}")
            _call("ip", "link", "set", f"{_LINK}-{host}", "netns", f"{_NAME}-{host}")
            _call("ip", "link", "set", f"{_LINK}p{host}", "master", _BRIDGE, "up")
            _call(*inside, "address", "add", f"10.77.0.{host + 1}/24", "dev", f"{_LINK}-{host}")
            _call(*inside, "link", "set", f"{_LINK}-{host}", "up")
            _call(*inside, "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            _call("ip", "netns", "exec", f"{_NAME}-{host}", "tc", "qdisc", "add", "dev", f"{_LINK}-{host}", *shape)
        yield
    finally:
        for host in range(count):
            # Before its namespace, which would take a link with it only later, when the next one of its name is made.
            subprocess.run(["ip", "link", "del", f"{_LINK}p{host}"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", f"{_NAME}-{host}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True, check=False)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def enter(ranks: int, rank: int) -> None:
    """Move this rank's process to its host."""
    host = rank // ranks
    namespace = os.open(f"/var/run/netns/{_NAME}-{host}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = f"{_LINK}-{host}"


def sent(count: int) -> list[int]:
    """Bytes that have left each host so far: what has come to its end of the link outside."""
    return [int(Path(f"/sys/class/net/{_LINK}p{host}/statistics/rx_bytes").read_text()) for host in range(count)]


def hsdp(ranks: int, task: Task, turns: Turns) -> None:
    """FSDP2 that shards within a host."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("replicate", "shard"))
    fsdp2(task, turns, mesh=mesh)


def engines_for(ranks: int, precision: str = "fp32") -> dict[str, Engine]:
    """What is measured: peers and stages, flat, within a host, and in fewer bytes."""
    found = {name: ENGINES[name] for name in ("ddp", "fsdp2")}
    found["fsdp2-node"] = replace(found["fsdp2"], label="FSDP2, sharded within a host", train=partial(hsdp, ranks))
    for stage in (1, 2, 3):
        flat = replace(ENGINES[f"zero{stage}-gloo"], label=f"zero{stage}, flat")
        by_host = ((RANKS_PER_HOST, str(ranks)),)  # as they are on one machine
        found[f"zero{stage}"] = replace(flat, label=f"zero{stage}", environment=by_host)
        found[f"zero{stage}-flat"] = flat
        gradients, both = Compression(gradients="int8"), Compression(weights="int8", gradients="int8")
        settings: dict[str, tuple[str, dict[str, Any]]] = {
            "int8": ("int8", {"compression": both if stage == 3 or precision != "fp32" else gradients}),
            "node": ("within a host", {"shard_within": ranks}),
            "node-int8": ("within a host, int8", {"shard_within": ranks, "compression": gradients}),
        }
        if stage == 3:
            settings["kept"] = "secondary shards", {"secondary_shards": True}
            settings["kept-int8"] = "secondary shards, int8", {**settings["kept"][1], **settings["int8"][1]}
        for name, (label, chosen) in settings.items():
            train = partial(lightning, strategy=partial(ZeroStrategy, stage, units=["Block"], **chosen))
            found[f"zero{stage}-{name}"] = replace(
                flat, label=f"zero{stage}, {label}", environment=by_host, train=train
            )
    return found


def measure(engine: Engine, task: Task, count: int, ranks: int, rounds: int) -> tuple[float, float]:
    """Seconds of a step, and bytes that leave the host that sends most. Raises ``WorldFailed``."""
    environment = dict(engine.environment)
    world = World(count * ranks, partial(engine.train, task), environment, enter=partial(enter, ranks))
    seconds, moved = [], []
    try:
        world.turn(1)
        for _ in range(rounds):
            before = sent(count)
            reports = world.turn(1)  # two steps, of which the second is timed
            moved.append(max(b - a for a, b in zip(before, sent(count), strict=True)) / 2)
            seconds.append(max(statistics.fmean(report.seconds) for report in reports))
    finally:
        world.close()
    return statistics.median(seconds), statistics.median(moved)


def main() -> None:
    """Measure, and print a table for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="10m")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host (default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="of a link: 10gbit, 200mbit, ...")
    parser.add_argument("--tokens", type=int, nargs=2, default=(2, 64), help="a rank's sequences and their length")
    parser.add_argument("--engines", nargs="+", choices=engines_for(2), default=list(engines_for(2)))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: mixed")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if os.name != "posix" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        print("Namespaces take root, `ip` and `tc`: nothing was measured.")
        return
    torch.set_num_threads(1)
    print(results.headline(results.circumstances()))
    numel = numel_of(*SIZES[options.model])
    task = Task(*SIZES[options.model], options.precision, tuple(options.tokens))
    for rate in options.rates:
        unit = next(unit for unit in _UNITS if rate.endswith(unit))
        per_second = float(rate.removesuffix(unit)) * _UNITS[unit] / 8
        where = f"{options.hosts} hosts of {options.ranks} ranks, links of {rate}"
        print(f"\n{options.model} in {options.precision}, {where}", flush=True)
        print(f"{'':32}{'bytes/parameter':>16}{'ms':>9}{'of the link':>13}")
        with hosts(options.hosts, rate):
            for name in options.engines:
                engine = engines_for(options.ranks, options.precision)[name]
                try:
                    seconds, moved = measure(engine, task, options.hosts, options.ranks, options.rounds)
                except WorldFailed as error:
                    print(f"{engine.label}: {error}")
                    continue
                busy = moved / per_second / seconds
                print(f"{engine.label:32}{moved / numel:16.2f}{1000 * seconds:9.0f}{busy:13.0%}", flush=True)


if __name__ == "__main__":
    main()
