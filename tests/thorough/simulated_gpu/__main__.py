"""Run a Python program on a simulated GPU; every program that it starts has it too.

    python -m tests.thorough.simulated_gpu -m pytest -m gpu tests/thorough/simulated_gpu/test_cuda.py
    python -m tests.thorough.simulated_gpu my_training.py

Needs g++, and a build of torch without CUDA: pip install "torch==2.13.*", for example.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.thorough.simulated_gpu.build import build

HERE = Path(__file__).parent


def main() -> None:
    """Compile what is not there yet, and become the program."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    environment = {**os.environ, "SIMULATED_GPU": str(build(HERE))}
    paths = [HERE / "site", HERE.parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
