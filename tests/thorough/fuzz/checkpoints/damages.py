"""What can happen to a file, or be done to it on purpose."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

Draw = random.Random
NUMBERS = (0, 1, 2, 3, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
TEXTS = (
    "-1",
    "0",
    "1",
    "2",
    "7",
    "99",
    "4096",
    str(2**31),
    str(2**40),
    str(2**63),
    str(2**64),
    "1" * 30,
    "1.5",
    "true",
)
TEXTS += ("null", "[]", "{}", '""', '"x"', "[[]]", '{"$":"tuple","value":[1]}', '{"$":"nope"}', "NaN", "1e400")


def flip(data: bytearray, draw: Draw) -> None:
    for _ in range(draw.choice((1, 1, 1, 1, 2, 5))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def change_byte(data: bytearray, draw: Draw) -> None:
    data[draw.randrange(len(data))] = draw.randrange(256)


def cut(data: bytearray, draw: Draw) -> None:
    del data[draw.randrange(len(data)) :]


def extend(data: bytearray, draw: Draw) -> None:
    data += draw.choice((b"\0", b"x", draw.randbytes(100), bytes(data[:200]), bytes(data)))


def _range(data: bytearray, draw: Draw) -> tuple[int, int]:
    begin = draw.randrange(len(data))
    return begin, min(len(data), begin + draw.choice((1, 2, 4, 8, 16, 64, 300, 4096)))


def zero(data: bytearray, draw: Draw) -> None:
    begin, end = _range(data, draw)
    data[begin:end] = draw.choice((b"\0", b"\xff")) * (end - begin)


def delete(data: bytearray, draw: Draw) -> None:
    begin, end = _range(data, draw)
    del data[begin:end]


def insert(data: bytearray, draw: Draw) -> None:
    begin, end = _range(data, draw)
    data[begin:begin] = draw.choice((data[begin:end], bytearray(draw.randbytes(end - begin))))


def swap(data: bytearray, draw: Draw) -> None:
    """Two ranges of the same length."""
    length = min(draw.choice((1, 4, 8, 64, 512)), len(data) // 2)
    first = draw.randrange(len(data) - length + 1)
    second = draw.randrange(len(data) - length + 1)
    if abs(first - second) >= length:
        data[first : first + length], data[second : second + length] = (
            data[second : second + length],
            data[first : first + length],
        )


def write_number(data: bytearray, draw: Draw) -> None:
    """Where a length, a count or an offset may be."""
    nbytes = min(draw.choice((1, 2, 4, 8)), len(data))
    begin = draw.randrange(len(data) - nbytes + 1)
    order = draw.choice(("little", "big"))
    number = draw.choice(NUMBERS)
    if draw.random() < 0.5:  # near to what is there
        number = max(0, int.from_bytes(data[begin : begin + nbytes], "little") + draw.choice((-8, -1, 1, 8, 64)))
    data[begin : begin + nbytes] = (number % 256**nbytes).to_bytes(nbytes, order)  # type: ignore[arg-type]


def write_text_number(data: bytearray, draw: Draw) -> None:
    """In JSON, and in names."""
    found = list(re.finditer(rb"\d+", data))
    if not found:
        return flip(data, draw)
    place = draw.choice(found)
    data[place.start() : place.end()] = draw.choice(TEXTS).encode()
    return None


def write_opcodes(data: bytearray, draw: Draw) -> None:
    """Instructions of a pickle, also such as would run code; ``canary`` is made if one does."""
    begin = draw.randrange(len(data))
    data[begin : begin + draw.choice((0, 0, 1, 2, 5))] = draw.choice(PAYLOADS)


BYTEWISE = (flip, flip, flip, change_byte, cut, extend, zero, delete, insert, swap, write_number, write_number)
FORGING = (write_text_number, write_opcodes, write_number, flip, insert, delete)

_MKDIR = b"X\x06\x00\x00\x00canary"
PAYLOADS = (
    b"cos\nmkdir\n" + _MKDIR + b"\x85R",  # reduce
    b"cposix\nmkdir\n" + _MKDIR + b"\x85R0",
    b"\x8c\x02os\x8c\x05mkdir\x93\x8c\x06canary\x85R",  # stack_global
    b"(X\x06\x00\x00\x00canaryios\nmkdir\n",  # inst
    b"(cos\nmkdir\n" + _MKDIR + b"o",  # obj
    b"cos\nmkdir\n" + _MKDIR + b"\x85\x81",  # newobj
    b"cos\nmkdir\n" + _MKDIR + b"\x85}\x92",  # newobj_ex
    b"cbuiltins\neval\nX\x1e\x00\x00\x00__import__('os').mkdir('canary')\x85R",
    b"cbuiltins\nexec\nX\x19\x00\x00\x00import os;os.mkdir('canary\x85R",
    b"cbuiltins\ngetattr\ncos\nmkdir\nX\x08\x00\x00\x00__call__\x86R" + _MKDIR + b"\x85R",
    b"ctorch._utils\n_rebuild_from_type_v2\n(cos\nmkdir\nctorch\nTensor\n" + _MKDIR + b"\x85}tR",
    b"ctorch._utils\n_rebuild_wrapper_subclass\n(cos\nmkdir\nN)NNNNNtR",
    b"ctorch.nn.parameter\nParameter\n)\x81}X\x0c\x00\x00\x00__setstate__cos\nmkdir\nsb",  # build
    b"ctorch\nTensor\n)\x81(cos\nmkdir\n" + _MKDIR + b"tb",
    b"ccollections\nOrderedDict\n)R}X\x07\x00\x00\x00__dict__}sb",
    b"\x82\x01",  # extensions
    b"\x83\x01\x00",
    b"\x84\x01\x00\x00\x00",
    b"Pos.mkdir\n",  # persistent ids
    b"(X\x06\x00\x00\x00modulecos\nmkdir\n" + _MKDIR + _MKDIR + b"tQ",
    b"(X\x07\x00\x00\x00storagecos\nmkdir\n" + _MKDIR + b"X\x03\x00\x00\x00cpuK\x01tQ",
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x06\0\0\0\0\0\x01tQ",
    b"]" * 5000,
    b"(" * 5000,
    b"r\xff\xff\xff\x7f",
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x00",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8d\xff\xff\xff\xff\xff\x00\x00\x00",
    b"X\xff\xff\xff\xff",
    b".",
)


class Case:
    """A damage to a copy of a checkpoint, described in ``told``.

    ``is_forged`` says that checksums were made to fit what was changed: they are no signature.
    """

    def __init__(self, path: Path, draw: Draw) -> None:
        self.told: list[str] = []
        self.is_forged = False
        self._draw = draw
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            files = sorted(file for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())
            files = [file for file in files if 0 < file.stat().st_size < 1 << 24]  # not what is sparse by now
            if files:
                self._damage(draw.choice(files), files)

    def _damage(self, file: Path, files: list[Path]) -> None:
        draw = self._draw
        chosen = draw.random()
        if chosen < 0.06:
            self._whole_file(file, files)
        elif chosen < 0.4 and self._forge(file):
            self.is_forged = True
        else:
            self._bytes(file, draw.choice(BYTEWISE))

    def _bytes(self, file: Path, change: Callable[[bytearray, Draw], None]) -> None:
        data = bytearray(file.read_bytes())
        change(data, self._draw)
        file.write_bytes(data)
        self.told.append(f"{change.__name__} {file.name}")

    def _whole_file(self, file: Path, files: list[Path]) -> None:
        other = self._draw.choice(files)
        what = self._draw.choice(("delete", "empty", "copy", "swap", "folder", "link", "pipe", "sparse"))
        self.told.append(f"{what} {file.name} {other.name}")
        if what == "empty":
            file.write_bytes(b"")
        elif what == "copy":
            file.write_bytes(other.read_bytes())
        elif what == "swap":
            first, second = file.read_bytes(), other.read_bytes()
            file.write_bytes(second)
            other.write_bytes(first)
        elif what == "sparse":
            os.truncate(file, self._draw.choice((1 << 33, 40 << 30)))
        else:
            file.unlink()
            if what == "folder":
                file.mkdir()
            elif what == "link":
                file.symlink_to(other)
            elif what == "pipe":
                os.mkfifo(file)

    def _forge(self, file: Path) -> bool:
        """Change what is behind a checksum, and the checksum with it."""
        data = file.read_bytes()
        changes = self._draw.choice(FORGING)
        if file.name == "zero.json":
            return self._forge_record(file)
        if data.startswith(b"PK\x03\x04") and file.suffix in (".ckpt", ".pt"):
            return self._forge_archive(file, data)
        if file.name == ".metadata" or data.startswith(b"\x80"):
            self._bytes(file, self._draw.choice((write_opcodes, write_number, changes)))
            return True
        if data[8:9] == b"{":
            content = bytearray(data[8 : 8 + int.from_bytes(data[:8], "little")])
            rest = data[8 + len(content) :]
            changes(content, self._draw)
            file.write_bytes(len(content).to_bytes(8, "little") + content + rest)
            self.told.append(f"header: {changes.__name__} {file.name}")
            return True
        return False

    def _forge_archive(self, file: Path, data: bytes) -> bool:
        made = io.BytesIO()
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(made, "w") as archive:
                names = source.namelist()
                chosen = self._draw.choice([name for name in names if name.endswith("data.pkl")] * 5 + names)
                change = write_opcodes if self._draw.random() < 0.5 else self._draw.choice(FORGING)
                for name in names:
                    content = bytearray(source.read(name))
                    if name == chosen and content:
                        change(content, self._draw)
                    archive.writestr(name, bytes(content))
        except Exception:  # damaged before
            return False
        file.write_bytes(made.getvalue())
        self.told.append(f"entry {chosen}: {change.__name__} {file.name}")
        return True

    def _forge_record(self, file: Path) -> bool:
        draw = self._draw
        try:
            text = file.read_text()
            begin = text.index('"content":') + len('"content":')
            content = bytearray(text[begin:].rstrip()[:-1].encode())
        except ValueError:
            return False
        change = draw.choice((write_text_number, write_text_number, write_number, delete, swap))
        for _ in range(draw.choice((1, 1, 2, 4))):
            change(content, draw)
        try:
            compact = json.dumps(json.loads(bytes(content)), separators=(",", ":")).encode()
        except (ValueError, RecursionError):
            compact = bytes(content)
        head = '{"format":"lightning_zero","version":1,"sha256":"' + hashlib.sha256(compact).hexdigest()
        file.write_bytes(head.encode() + b'",\n"content":' + bytes(content) + b"}\n")
        self.told.append(f"record: {change.__name__}")
        return True
