"""Compiles the device and its process group, once for each torch and each state of the sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

__all__ = ["build"]

SOURCES = {"device.cpp": "device.so", "nccl.cpp": "simulated_nccl.so"}
OPTIONS = ["-std=c++20", "-O1", "-Wno-attributes", "-fPIC", "-shared"]
DEFINED = ["-DTORCH_EXTENSION_NAME=simulated_nccl", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED", "-DUSE_RPC"]
LIBRARIES = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]


def build(folder: Path) -> Path:
    """The folder in which the libraries of the sources of ``folder`` are.

    Raises:
        SystemExit: if torch has CUDA of its own, or the sources do not compile.
    """
    if torch.version.cuda is not None:
        sys.exit(f"torch {torch.__version__} has CUDA of its own: a simulated GPU needs a build for CPUs.")
    sources = [folder / name for name in SOURCES]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + torch.__version__.encode()).hexdigest()
    built = Path(tempfile.gettempdir()) / f"lightning_zero-simulated-gpu-{os.getuid()}-{state[:16]}"
    own = Path(torch.__file__).parent
    included = [own / "include", own / "include" / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    options = [*OPTIONS, *DEFINED, *(f"-I{path}" for path in included)]
    linked = [f"-L{own / 'lib'}", f"-Wl,-rpath,{own / 'lib'}", *LIBRARIES]
    built.mkdir(mode=0o700, exist_ok=True)
    for source, name in zip(sources, SOURCES.values(), strict=True):
        if not (built / name).exists():
            print(f"compiling {source.name}, which takes a minute", file=sys.stderr)
            unfinished = built / f"{name}.{os.getpid()}"
            if subprocess.run(["g++", *options, str(source), "-o", str(unfinished), *linked], check=False).returncode:
                sys.exit(f"{source.name} did not compile with torch {torch.__version__}.")
            unfinished.replace(built / name)
    return built
