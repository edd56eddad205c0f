"""Play features and tell: ``python -m tests.thorough.features [NAME...]``. ``--page`` writes the page.

``--hosts [NAME...]``: whether each is the same on two hosts of two ranks as on one of four.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.thorough.features import page
from tests.thorough.features.feature import hold, hold_on_two_hosts


def main(names: list[str]) -> int:
    if names == ["--page"]:
        (Path(__file__).parents[3] / "docs" / "features.md").write_text(page.text(), encoding="utf-8")
        return 0
    failed, across = 0, names[:1] == ["--hosts"]
    names = names[across:]
    for feature in (feature for features in page.TABLES.values() for feature in features):
        if names and not any(name in feature.name for name in names):
            continue
        began, verdict = time.monotonic(), "holds"
        try:
            if across:
                hold_on_two_hosts(feature)
            for ranks in () if across else (1, 2):
                hold([feature], ranks)
        except Exception as error:
            failed += 1
            verdict = f"FAILS {type(error).__name__}: {error}"
        print(f"{time.monotonic() - began:5.1f} s  {feature.name}: {verdict}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
