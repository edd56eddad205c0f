"""The training as a program: ``python -m tests.thorough.chaos.program FOLDER STAGE VICTIM``, or by torchrun.

The victim is killed in its sixth step, in the first attempt of all. What follows goes on from ``ckpt_path="last"``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from tests.thorough.chaos.run import Scene, attempt

if __name__ == "__main__":
    faulthandler.dump_traceback_later(60, exit=True)
    folder, stage, victim = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    scene = Scene(
        folder, stage, act=lambda module: os.kill(os.getpid(), signal.SIGKILL), place="layer", step=5, victims=(victim,)
    )
    if (folder / f"struck.{victim}").exists():
        scene.act = None
    sys.exit(attempt(rank, scene))
