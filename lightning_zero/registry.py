"""The extensions: parts of the package that a copy can do without.

Each is a file or a folder of ``lightning_zero/extensions/``. The core names an extension here, and nowhere imports one:
it calls :func:`extension` where the setting that needs it is read.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_zero.errors import ExtensionError

__all__ = ["EXTENSIONS", "extension", "installed"]

_FOLDER = "lightning_zero.extensions"

# What each extension does, as an error about a missing one says it.
EXTENSIONS = {
    "closures": "optimizers that need a closure in their step (LBFGS, SAM)",
    "compression": "quantised communication (`Compression`)",
    "eight_bit": "`AdamW8bit`",
    "doctor": "`lightning-zero doctor`",
    "formats": "checkpoints of DeepSpeed, safetensors, and models of Hugging Face",
    "hops": "communication in two hops, within a host and between hosts, and secondary shards",
    "inspection": "`lightning-zero inspect`, `verify_checkpoint` and checksums compared on resuming",
    "monitors": "`MemoryMonitor`, `CommunicationMonitor` and `InstabilityMonitor`",
    "nvme": "offload to files (`NvmeOffload`)",
    "partitioned_activations": "activations split over a tensor-parallel group (`ActivationPolicy(partition=True)`)",
    "planner": '`lightning-zero plan`, `estimate_memory`, `measure_activations` and `strategy="zero"`',
    "random_state": "random states in checkpoints",
    "ray": "`lightning_zero.ray`",
    "shared_memory": "communication through the shared memory of a host's processes",
    "tensor_parallel": "tensor parallelism (`tensor_parallel_size`)",
    "tune": "`lightning-zero tune`",
    "watch": "the report of which rank waits for which",
}


@cache
def installed(name: str) -> bool:
    """Whether an extension is there, for what has another way without it. Looked up once: waits ask again and again."""
    if name not in EXTENSIONS:
        raise KeyError(f"no extension is called '{name}': {', '.join(EXTENSIONS)}")
    return find_spec(f"{_FOLDER}.{name}") is not None


def extension(name: str, instead: str = "leave out the setting that asks for it", *, why: str = "") -> Any:
    """The module of an extension, imported when it is first asked for.

    Args:
        name: a name in ``EXTENSIONS``.
        instead: what a user can do without it, for the error.
        why: what needs it, as a sentence, for the error.

    Raises:
        ExtensionError: it was deleted from this copy of the package.
    """
    if not installed(name):
        raise ExtensionError(
            f"This copy of lightning_zero has no extension '{name}', which has {EXTENSIONS[name]}. Install "
            f"lightning_zero again, or {instead}.{why and ' ' + why}"
        )
    return import_module(f"{_FOLDER}.{name}")
