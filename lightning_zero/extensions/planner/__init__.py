"""The planner: ``lightning-zero plan``, ``estimate_memory`` and ``measure_activations``.

What a plan costs, stages compared, and reports. Imported without torch, for the command's help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lightning_zero.cli import short_help

__all__ = ["OPTIONS", "WHAT", "describe_plan", "estimate_memory", "measure_activations", "run"]

_COSTS = ("OptimizerCost", "expected_disk", "expected_host_memory", "expected_memory", "stage_memory")
_LATER = dict.fromkeys(_COSTS, "costs") | dict.fromkeys(("describe_plan", "estimate_memory"), "estimate")
_LATER |= {"measure_activations": "measure", "planner_of": "command"}
_LATER |= dict.fromkeys(("activations_of", "choose_stage", "free_host_memory"), "choose")

WHAT = """\
Shows how a model would be sharded over ranks, how much memory each stage needs, and which stage to choose.

Give the model by --config or --model, by a Hugging Face configuration (--hf-config), or as a number of parameters
(--parameters). It is built on the meta device: nothing is trained or allocated. Accepts every option of ``fit``, so you
can pass the configuration of a run unchanged; data are used only for ``--activations measured``. The stage, the number
of ranks and the other settings of the plan come from ``trainer`` unless they are given.
"""
OPTIONS = {
    "hf_config": "A config.json, or a folder with one.",
    "parameters": "Number of parameters, instead of a model: 7.5B.",
    "device_memory": "Memory of one device, for example 80G or 24GiB; recommends a stage that fits.",
    "host_memory": "Memory of one node, for all its ranks: 512GB. Unlimited if not given.",
    "activations": "Memory to keep free for activations: 20GB; or measured, from the first batch, without allocating.",
    "batch_size": "Sequences per rank, to measure the activations of --hf-config.",
    "sequence_length": "Tokens per sequence there.",
    "json": "Print everything as one JSON object.",
    "stage": "ZeRO stage: 1, 2 or 3. From trainer.strategy if not given.",
    "world_size": "Number of ranks. trainer.devices * trainer.num_nodes if not given.",
    "tensor_parallel_size": "Neighbouring ranks that compute each layer together, or auto: those of a node.",
    "units": "Class names that become units.",
    "bucket_mib": "Size of a gradient bucket in MiB (stages 1 and 2).",
    "prefetch": "Units gathered ahead of the one that computes (stage 3).",
    "offload": "Where to keep optimizer state (and stage 3 parameters): host, nvme, none. Default: trainer.strategy.",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def run(args: Sequence[str]) -> int:
    """Print what ``lightning-zero plan`` has to say: 0. 2 if the settings are wrong, 1 if something else fails."""
    if list(args) in (["-h"], ["--help"]):
        print(short_help("plan", WHAT, OPTIONS), end="")  # noqa: T201
        return 0
    try:
        text = __getattr__("planner_of")(args).report()
    except (ValueError, OSError, ImportError) as error:
        print(f"lightning-zero plan: error: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ValueError) else 1
    print(text)  # noqa: T201
    return 0
