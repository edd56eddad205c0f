"""What a pickle would make, found out without making it.

[Note: What a pickle asks for]

A pickle is a program for a stack machine. One of a kilobyte can put a tuple twice into the next, sixty times over, and
use the last as a key: its hash takes 2^60 steps. It can ask for an array of any length, or for a storage that the file
has no bytes for. So the program is followed first, with two numbers in place of each value: how many values it would be
with all that it shares written out, and how deep they lie in one another. What is added to a list after the list went
into something else is not counted there: no hash and no copy into a tuple sees it, which is what unpickling does. What
looks through a structure afterwards has to know by itself where it has been.
"""

from __future__ import annotations

import pickletools
from typing import IO, Any, NamedTuple

__all__ = ["Asked", "follow"]

_MAX_DEPTH = 256
_MAX_STACK = 1 << 20  # of values that wait to be put into another, which pickling does for each thousand
_MAX_SHARING, _MANY = 16, 1 << 20  # a value may be that many times as many as there are instructions, or that many

_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_CALLS = {"REDUCE", "NEWOBJ"}  # those that torch knows
_FORBIDDEN = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4", "PERSID"}


class _Effect(NamedTuple):
    """What an opcode takes from the stack beside all above the last mark, and whether it leaves a value there."""

    below: int
    to_mark: bool
    leaves: bool


_EFFECTS: dict[str, _Effect] = {}
for _opcode in pickletools.opcodes:
    _taken = [item.name for item in _opcode.stack_before]
    _below = _taken.index("mark") if "mark" in _taken else len(_taken)
    _EFFECTS[_opcode.name] = _Effect(_below, "mark" in _taken, bool(_opcode.stack_after))
_ATOMS = {name for name, effect in _EFFECTS.items() if effect == (0, False, True)}
_ATOMS -= {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "MARK", *_GETS}


_ATOM = (1, 0, None)


class Asked(NamedTuple):
    """What a pickle asks for: persistent ids, and what is called, each as (``"module name"``, arguments).

    Numbers, texts, names and tuples of them are given as they are, anything else as ``None``.
    """

    storages: list[Any]
    calls: list[tuple[Any, Any]]


def follow(data: bytes | IO[bytes], nbytes: int, *, max_depth: int = _MAX_DEPTH, values: bool = True) -> Asked:
    """Follow one pickle of at most ``nbytes`` to its end. See [Note: What a pickle asks for].

    Without ``values`` nothing is remembered of what it asks for.

    Raises:
        ValueError: if a value in it is too deep, or too large with what it shares written out, if it asks for memory
            that it does not fill, or if it is none.
    """
    asked = Asked([], [])
    # A value is its number of values, its depth, and what it is: itself, or parts of it.
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    count = 0
    for opcode, argument, position in pickletools.genops(data):
        name, count = opcode.name, count + 1
        if name in _FORBIDDEN or (name in _PUTS and int(argument or 0) >= nbytes) or (position or 0) > nbytes:
            raise ValueError(f"it holds {name} {str(argument)[:40]} at byte {position}, which no checkpoint needs")
        try:
            if name in _ATOMS:
                stack.append((1, 0, argument) if values else _ATOM)
            elif name in _GETS:
                stack.append(memo[argument])
            elif name in _PUTS or name == "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name == "MARK":
                marks.append(len(stack))
            elif name == "DUP":
                stack.append(stack[-1])
            elif name == "POP" and marks and marks[-1] == len(stack):
                marks.pop()
            else:
                number, depth = _do(name, stack, marks, asked if values else None)
                if number > _MANY and number > _MAX_SHARING * count:
                    raise ValueError(f"it holds the same values in one another until they are {number}")
                if depth > max_depth:
                    raise ValueError(f"it holds values in one another more than {max_depth} deep")
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged: {name} at byte {position} cannot be done") from error
        if len(stack) > _MAX_STACK:
            raise ValueError(f"it holds over {_MAX_STACK} values that go nowhere")
    return asked


def _do(name: str, stack: list[Any], marks: list[int], asked: Asked | None) -> tuple[int, int]:
    """One instruction that takes values and leaves none, a changed one, or a new one: its number and depth."""
    effect = _EFFECTS[name]
    begin = (marks.pop() if effect.to_mark else len(stack)) - effect.below
    if begin < (marks[-1] if marks else 0):
        raise IndexError(name)
    taken = stack[begin:]
    del stack[begin:]
    if not effect.leaves:
        return 0, 0
    value: Any = taken.pop(0) if name in _CHANGES else [1, 0, None]
    number, depth = 0, value[1]
    for part in taken:
        number += part[0]
        if part[1] >= depth:
            depth = part[1] + 1
    value[0] += number
    value[1] = depth
    stack.append(value)
    if asked is None:
        return value[0], depth
    if name == "STACK_GLOBAL":
        value[2] = " ".join(str(part[2]) for part in taken)
    elif name.startswith("TUPLE"):
        value[2] = taken
    elif name == "BINPERSID":
        asked.storages.append(_plain(taken[0]))
    elif name in _CALLS:
        asked.calls.append((_plain(taken[0]), _plain(taken[1])))
    return value[0], depth


def _plain(value: Any, depth: int = 2) -> Any:
    """A value, as far as it is made of numbers, texts, names and tuples."""
    parts = value[2]
    if type(parts) is not list:
        return parts
    return tuple(_plain(part, depth - 1) for part in parts) if depth else None
