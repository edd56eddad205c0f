"""Draw the pictures of the documentation that explain: ``python docs/pictures/draw.py`` writes the SVG files beside it.

They are 800 pixels wide, and follow the reader's light or dark scheme.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
STYLE = """
.bg{fill:#ffffff} .t{fill:#1f2328} .s{fill:#57606a} .line{stroke:#57606a;fill:none;stroke-width:2}
.head{fill:#57606a} .empty{fill:none;stroke:#8c959f;stroke-dasharray:4 4} .w{fill:#ffffff}
.p{fill:#3b6ea5} .g{fill:#b8641b} .o{fill:#4f7f3f} .c{fill:#6e5494}
@media (prefers-color-scheme: dark){
.bg{fill:#0d1117} .t{fill:#e6edf3} .s{fill:#9da7b3} .line{stroke:#9da7b3} .head{fill:#9da7b3} .empty{stroke:#6e7681}}
"""


class Picture:
    """Shapes on 800 pixels, in order."""

    def __init__(self, title: str, height: int) -> None:
        self.height = height
        self.parts: list[str] = []
        self.title = title
        self.text(16, 28, title, size=18, bold=True)

    def text(
        self, x: float, y: float, text: str, kind: str = "t", *, at: str = "start", size: int = 14, bold=False
    ) -> None:
        """One line of text whose base line is at ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}"{weight}{anchor}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """A box with centred lines of text."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        for number, line in enumerate(lines):
            place = y + height / 2 + 5 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, place, line, "s" if kind == "empty" else "w", at="middle", size=13)

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line with a head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="line" d="{path}" marker-end="url(#head)"/>')

    def write(self, name: str) -> None:
        """The file, beside this one."""
        size = f'width="800" height="{self.height}" viewBox="0 0 800 {self.height}"'
        (HERE / name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{escape(self.title)}">\n'
            f"<style>{STYLE}</style>\n"
            '<marker id="head" markerWidth="10" markerHeight="8" refX="9" refY="4" orient="auto">'
            '<path class="head" d="M0 0 L10 4 L0 8 z"/></marker>\n'
            f'<rect class="bg" width="800" height="{self.height}"/>\n' + "\n".join(self.parts) + "\n</svg>\n",
            encoding="utf-8",
        )


def stages() -> None:
    """Bytes per parameter of one of four ranks, in bars."""
    picture = Picture("What one of 4 ranks holds, in bytes per parameter", 316)
    rows = {"parameters": "p", "gradients": "g", "optimizer state": "o"}
    for place, (name, kind) in enumerate(rows.items()):
        picture.box(96 + place * 150, 46, 16, 16, kind)
        picture.text(120 + place * 150, 60, name, size=16)
    ways = {"DDP": (4, 4, 8), "zero1": (4, 4, 2), "zero2": (4, 1, 2), "zero3": (1, 1, 2)}
    for line, (way, sizes) in enumerate(ways.items()):
        left, top = 96.0, 80 + line * 54
        picture.text(82, top + 26, way, at="end", bold=True, size=17)
        for nbytes, kind in zip(sizes, rows.values(), strict=True):
            picture.box(left, top, nbytes * 38 - 2, 40, kind, str(nbytes))
            left += nbytes * 38
        picture.text(left + 10, top + 26, str(sum(sizes)), bold=True, size=17)
    picture.text(16, 304, "float32 with Adam, between two steps; zero2 and zero3 also hold buffers of fixed size", "s")
    picture.write("stages.svg")


def split() -> None:
    """What each of four ranks holds."""
    picture = Picture("What each of 4 ranks holds between steps", 300)
    rows = {"parameters": "p", "gradients": "g", "optimizer state": "o"}
    ways = {"DDP": "", "zero1": "o", "zero2": "go", "zero3": "pgo"}
    for column, (way, sharded) in enumerate(ways.items()):
        left = 144 + column * 164
        picture.text(left + 72, 62, way, at="middle", bold=True, size=15)
        for line, kind in enumerate(rows.values()):
            top = 76 + line * 62
            for rank in range(4):
                if kind in sharded:
                    picture.box(left + rank * 37, top, 33, 48, "empty")
                    picture.box(left + rank * 37, top + 12 * rank, 33, 12, kind)
                else:
                    picture.box(left + rank * 37, top, 33, 48, kind)
        for rank in range(4):
            picture.text(left + rank * 37 + 16, 276, str(rank), "s", at="middle", size=13)
    for line, name in enumerate(rows):
        picture.text(130, 105 + line * 62, name, at="end")
    picture.text(130, 276, "rank", "s", at="end", size=13)
    picture.write("split.svg")


def step() -> None:
    """A step of zero3 with three units."""
    picture = Picture("A step of zero3 with three units: communication overlaps with computation", 250)
    lanes = {"gather": 60, "compute": 108, "reduce": 156}
    for name, top in lanes.items():
        picture.text(16, top + 25, name)
    left, wide = 92.0, 68.0
    # (lane, start, length, kind, label), in slots of one unit's time
    forward = [("gather", unit, 1, "p", f"{unit + 1}") for unit in range(3)]
    forward += [("compute", unit + 1, 1, "c", f"fwd {unit + 1}") for unit in range(3)]
    backward = [("gather", 4, 1, "p", "2"), ("gather", 5, 1, "p", "1")]
    backward += [("compute", 4 + place, 1, "c", f"bwd {3 - place}") for place in range(3)]
    backward += [("reduce", 5 + place, 1, "g", f"{3 - place}") for place in range(3)]
    for lane, start, length, kind, label in [*forward, *backward]:
        picture.box(left + start * wide, lanes[lane], length * wide - 4, 40, kind, label)
    picture.box(left + 8 * wide, lanes["compute"], 2 * wide - 8, 40, "o", "optimizer step", "on the shard")
    for x, text in [(0, "unshard unit 1"), (4, "unit 3 is still full"), (8, "all gradients are reduced")]:
        picture.text(left + x * wide, 52, text, "s", size=12)
    picture.text(16, 222, "Each unit is all-gathered one ahead of its use, and resharded after it.", "s")
    picture.text(
        16, 240, "Its gradients are reduce-scattered when its bucket is full, while the backward continues.", "s"
    )
    picture.write("step.svg")


def gradient() -> None:
    """The way of a gradient."""
    picture = Picture("The way of a gradient in zero3", 270)
    picture.box(16, 60, 150, 60, "g", "autograd", "one parameter")
    picture.arrow((166, 90), (206, 90))
    picture.box(210, 60, 170, 60, "g", "gradient buffer", "of the unit, full size")
    picture.arrow((380, 90), (436, 90))
    picture.text(408, 80, "full", "s", at="middle", size=12)
    picture.box(440, 60, 150, 60, "g", "reduce-scatter", "sum, then divide")
    picture.arrow((590, 90), (630, 90))
    picture.box(634, 60, 150, 60, "g", "gradient shard", "1/W, float32")
    picture.arrow((709, 120), (709, 170))
    picture.text(700, 150, "clip", "s", at="end", size=12)
    picture.box(634, 174, 150, 60, "o", "optimizer step", "master shard, 1/W")
    picture.arrow((634, 204), (594, 204))
    picture.box(440, 174, 150, 60, "p", "all-gather", "before the next use")
    picture.arrow((440, 204), (384, 204))
    picture.box(210, 174, 170, 60, "p", "parameter buffer", "of the unit, full size")
    picture.arrow((210, 204), (170, 204))
    picture.box(16, 174, 150, 60, "c", "forward", "backward")
    picture.text(16, 258, "Buffers come from a pool and are used again by other units. W is the number of ranks.", "s")
    picture.write("gradient.svg")


def checkpoint() -> None:
    """A checkpoint directory."""
    picture = Picture("A checkpoint directory: every rank writes its own shard", 290)
    for rank in range(3):
        top = 56 + rank * 54
        picture.box(16, top, 110, 40, "c", f"rank {rank}")
        picture.arrow((126, top + 20), (206, top + 20))
        picture.box(210, top, 230, 40, "p", f"__{rank}_0.distcp")
        picture.text(456, top + 25, "the rank's part of weights and optimizer state", "s")
    picture.arrow((16, 76), (8, 76), (8, 238), (206, 238))
    picture.box(210, 218, 230, 40, "o", "zero.json, last")
    picture.text(456, 234, "written by rank 0: index, sizes, checksums.", "s")
    picture.text(456, 252, "Until it is there, the old checkpoint counts.", "s")
    picture.text(16, 282, ".metadata and meta.pt are for torch.distributed.checkpoint and Lightning.", "s")
    picture.write("checkpoint.svg")


if __name__ == "__main__":
    for draw in (stages, split, step, gradient, checkpoint):
        draw()
