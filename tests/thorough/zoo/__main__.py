"""Play architectures, and tell: ``python -m tests.thorough.zoo [NAME...]``. ``--page``: write the page."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from tests.thorough.zoo import page
from tests.thorough.zoo.play import hold


def main(names: list[str]) -> int:
    if names == ["--page"]:
        (Path(__file__).parents[3] / "docs" / "models.md").write_text(page.text(), encoding="utf-8")
        return 0
    failed = 0
    for library in page.LIBRARIES:
        for architecture in importlib.import_module(f"tests.thorough.zoo.{library}_models").ARCHITECTURES:
            if names and architecture.name not in names:
                continue
            began = time.monotonic()
            try:
                hold(architecture)
                verdict = "holds"
            except Exception as error:
                failed += 1
                verdict = "FAILS " + " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"{library:13} {architecture.name:30} {time.monotonic() - began:5.1f} s  {verdict}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
