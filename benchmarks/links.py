"""How long links take with a step, by the number of nodes, for every way to send it. Computed: nothing runs.

    python benchmarks/links.py
    python benchmarks/links.py --ranks 4 --between 1Gbit/s --within 2GB/s --micro-steps 4

Bytes are those of the plan for a GPT (``lightning-zero plan`` has the formulas; ``network.py`` measures them on a few
nodes). Besides, each message that has to wait for another one takes a latency, and each that a rank sends some time of
its own: DDP's all-reduce goes round a ring of all ranks, in buckets at once, and ours send to each rank of a node and
then to each node. An agreement waits for as many messages as the number of ranks has binary digits. Nothing overlaps
with anything. So it tells ways apart, and what grows, and no step's time. Ranks are on CPUs, where collectives take two
hops, within a node and between nodes; with nodes of different sizes there is one hop among all ranks.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import results
import torch
from engines import SIZES
from offload_training import GPT
from torch import nn

from lightning_zero import ZeroPlan, build_plan
from lightning_zero.config import Placement
from lightning_zero.extensions.planner.estimate import on_links

BUCKET_NBYTES = 25 * 2**20  # of DDP
WAYS = {
    "DDP": "#8c959f",
    "zero1": "#e0a100",
    "zero3, nodes of different sizes": "#4c8fc0",
    "zero3": "#e6550d",
    "zero3, secondary_shards": "#c2569b",
    "zero3, shard_within a node": "#4f9f5f",
    "zero3, secondary_shards, int8": "#8e63ce",
}


def parse_speed(text: str) -> float:
    """Bytes a second of ``"10Gbit/s"`` or ``"1.25GB/s"`` (units of 1000), or ValueError."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(bit|B)/s", text)
    if matched is None or not float(matched[1]):
        raise ValueError(f"a speed like '10Gbit/s' or '1.25GB/s' is needed, got {text!r}")
    return float(matched[1]) * 1000.0 ** " KMGT".index(matched[2].upper() or " ") / (1 if matched[3] == "B" else 8)


def plan_of(model: nn.Module, stage: int, ranks: int, span: int | None = None, keeping: int | None = None) -> ZeroPlan:
    """In ``float32``, as CPU ranks train."""
    placement = replace(Placement.from_stage(stage), span=span, keeping=keeping)
    return build_plan(model, placement=placement, world_size=ranks, units=["Block"])


@dataclass(frozen=True)
class Sent:
    """Of a step: bytes that leave a node, bytes and messages that a rank sends, and messages that wait for others."""

    between: float
    within: float
    messages: int
    waits: int


def sent(way: str, model: nn.Module, hosts: int, ranks: int, micro_steps: int) -> Sent:
    """By the formulas of the plan."""
    world = hosts * ranks
    if way == "DDP":
        nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
        ring, hops = 2 * nbytes * (world - 1) / world, 2 * (world - 1)
        return Sent(ring, ring * (ranks - 1) / ranks, hops * math.ceil(nbytes / BUCKET_NBYTES), hops)
    stage = int(way[4])
    span, keeping = (ranks if word in way else None for word in ("within", "secondary"))
    traffic = plan_of(model, stage, world, span, keeping).expected_traffic(micro_steps=micro_steps)
    kind = "int8" if "int8" in way else None
    between, within = on_links(traffic, hosts, rings=False, formats=(kind, kind))
    calls = traffic.all_gather.calls + traffic.reduce_scatter.calls
    agreements = (1 + (3 if stage == 3 else 2) * micro_steps) * math.ceil(math.log2(world))
    if "different" in way:
        return Sent(between * ranks, within, calls * (world - 1) + agreements, calls + agreements)
    crossing = (traffic.copies + traffic.exact + traffic.reduce_scatter).calls
    if traffic.all_reduce.calls:
        crossing = 2 * traffic.all_reduce.calls
    messages = calls * (ranks - 1) + crossing * (hosts - 1) + agreements
    return Sent(between, within, messages, calls + crossing + agreements)


def seconds(way: str, model: nn.Module, hosts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Of a step on the links."""
    found = sent(way, model, hosts, options.ranks, options.micro_steps)
    parts = {
        "between": found.between / parse_speed(options.between),
        "within": found.within / parse_speed(options.within),
        "messages": found.messages * options.message + found.waits * options.latency,
    }
    return {"way": way, "hosts": hosts, **parts, "seconds": sum(parts.values())}


def show(rows: list[dict[str, Any]], hosts: list[int]) -> None:
    """The table, and who is fastest."""
    print("\nseconds of a step on the links" + "".join(f"{count:>9}" for count in hosts) + " nodes")
    for way in WAYS:
        mine = {row["hosts"]: row["seconds"] for row in rows if row["way"] == way}
        print(f"{way:30}" + "".join(f"{mine[count]:9.3f}" for count in hosts))
    exact = [row for row in rows if "int8" not in row["way"]]
    for count in hosts:
        best = min((row for row in exact if row["hosts"] == count), key=lambda row: row["seconds"])
        print(f"{count} nodes: without rounding the fastest is {best['way']}")


def plot(case: dict[str, Any], folder: Path) -> None:
    """``links.svg``: seconds by nodes."""
    drawn = results.figure(1, 1, (results.WIDTH, 4))
    if drawn is None:
        return
    picture, ((field,),) = drawn
    for way, colour in WAYS.items():
        rows = [row for row in case["rows"] if row["way"] == way]
        field.plot(
            [row["hosts"] for row in rows],
            [row["seconds"] for row in rows],
            "o--" if "within" in way else "o-",
            color=colour,
            linewidth=4 if way.endswith("secondary_shards") else 1.5,  # seen below the one that lies on it
            label=way,
        )
    field.set_xscale("log", base=2)
    field.set_yscale("log")
    hosts = sorted({row["hosts"] for row in case["rows"]})
    field.set_xticks(hosts, [str(number) for number in hosts])
    field.yaxis.set_major_formatter("{x:g}")
    field.set_xlabel(f"nodes of {case['ranks']} ranks")
    field.set_ylabel("seconds per step")
    for side in ("top", "right"):
        field.spines[side].set_visible(False)
    field.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    title = f"{case['model'].upper()}: communication time of a step at {case['between']} between nodes (computed)"
    picture.suptitle(title, x=0.01, ha="left")
    results.save_figure(picture, folder / "links.svg")


def main() -> None:
    """Compute, print the table, and write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="125m")
    parser.add_argument("--nodes", "--hosts", dest="hosts", type=int, nargs="+", default=[2, 8, 32, 128, 512])
    parser.add_argument("--ranks", type=int, default=8, help="on each node (default: %(default)s)")
    parser.add_argument("--between", default="10Gbit/s", help="of a node's link (default: %(default)s)")
    parser.add_argument("--within", default="5GB/s", help="of a rank's link in its node (default: %(default)s)")
    parser.add_argument(
        "--latency", type=float, default=50e-6, help="seconds until a message is there (default: %(default)s)"
    )
    parser.add_argument("--message", type=float, default=5e-6, help="seconds to send one (default: %(default)s)")
    parser.add_argument("--micro-steps", type=int, default=1)
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder of JSON and plot")
    options = parser.parse_args()
    with torch.device("meta"):
        model = GPT(*SIZES[options.model])
    run = results.circumstances()
    print(results.headline(run))
    rows = [seconds(way, model, count, options) for count in options.hosts for way in WAYS]
    show(rows, options.hosts)
    case = {"name": "links", **vars(options), "results": None, "rows": rows, "run": run}
    results.save(options.results / "links.json", [case], ("name",))
    plot(case, options.results)


if __name__ == "__main__":
    main()
