"""The planner: ``lightning-zero plan``, ``estimate_memory`` and ``measure_activations``.

What a plan costs, stages compared, and reports. Imported without torch, for the command's help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lightning_zero.cli import short_help

__all__ = ["OPTIONS", "WHAT", "describe_plan", "estimate_memory", "help_text", "measure_activations", "run"]

_COSTS = ("OptimizerCost", "expected_disk", "expected_host_memory", "expected_memory", "stage_memory")
_LATER = dict.fromkeys(_COSTS, "costs") | dict.fromkeys(("describe_plan", "estimate_memory"), "estimate")
_LATER |= {"measure_activations": "measure", "planner_of": "command"}

WHAT = """\
Shows how a model would be split over processes, what every stage would take of each, and which one to choose.

The model is the configuration's (or --model), that of a Hugging Face configuration (--hf-config), or a number of
parameters (--parameters). It is built on the meta device: nothing is trained or allocated. Understands every option
of ``fit``, so that the configuration of a run can be given as it is; data are only for ``--activations measured``. The
stage, the number of processes and the other settings of the plan come from ``trainer`` unless they are given.
"""
OPTIONS = {
    "hf_config": "A config.json, or a folder with one.",
    "parameters": "A number of parameters instead of a model: 7.5B.",
    "device_memory": "Memory of one device, for example 80G or 24GiB: recommends a stage that fits.",
    "host_memory": "Memory of a machine, for all its processes: 512GB. As much as it takes if not given.",
    "activations": "What has to stay free on the device; or measured: with the data's first batch, and no memory.",
    "lora": "Rank of LoRA adapters, which alone are trained, where peft puts them: 16. Needs peft.",
    "lora_targets": "What gets an adapter, if not what peft chooses for the model: q_proj,v_proj, or all-linear.",
    "batch_size": "Of one process, to measure activations of --hf-config with.",
    "sequence_length": "Tokens of each example there.",
    "link_between": "Speed of a machine's link to the others, each way: 10Gbit/s or 10Gbps. Shows seconds.",
    "link_within": "Speed of a process's link within its machine, each way: 100GB/s.",
    "plot": "Write a picture, FILE.png or FILE.svg: a bar of each stage. Needs matplotlib.",
    "json": "Print everything as one JSON object.",
    "stage": "ZeRO stage: 1, 2 or 3. From trainer.strategy if not given.",
    "world_size": "Number of processes. trainer.devices * trainer.num_nodes if not given.",
    "units": "Class names that become units.",
    "bucket_mib": "Size of a gradient bucket in MiB (stages 1 and 2).",
    "prefetch": "Units gathered ahead of the one that computes (stage 3).",
    "offload": "Where optimizer state stays, in stage 3 parameters too: host, nvme, none. As trainer.strategy has it.",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def help_text() -> str:
    """What ``lightning-zero plan --help`` prints."""
    return short_help("plan", WHAT, OPTIONS)


def run(args: Sequence[str]) -> int:
    """Print what ``lightning-zero plan`` has to say: 0. 2 if the settings are wrong, 1 if something else fails."""
    try:
        text = __getattr__("planner_of")(args).report()
    except (ValueError, OSError, ImportError) as error:
        print(f"lightning-zero plan: error: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ValueError) else 1
    print(text)  # noqa: T201
    return 0
