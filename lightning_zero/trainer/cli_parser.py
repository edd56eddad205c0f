"""The parser of the package's command lines: it says in one line what is wrong with which option or setting."""

from __future__ import annotations

import importlib
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import IO, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry

__all__ = ["OneLineParser", "no_strategy", "refused_by_the_class"]

# The parts of jsonargparse's messages: a tree, indented, with a branch for each type that a value may have.
_KEY = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN = re.compile(
    r"(?:Group '(.+)' does not accept option |(?:Subc.+ o|O)ption |unrecognized arguments: --)'?([\w.-]+)"
)
_NO_CLASS = re.compile(r"Expected a dot import path string: (.+)")
_EXPECTED = re.compile(r"Expected an? ((?:<class|typing\.).+?)(?:\. Got value: .*)?$")
_FOUND = re.compile(r"(?:Got|Given) value: (?:NestedArg\(key='.+?', val='(.*)'\)|(.*))$", re.MULTILINE)
_TYPE = re.compile(r"<class '([\w.]+)'>|typing\.(?:Literal\[(.+?)\])?")
_REASON = re.compile(r"^ *- (?!Expected |Does not validate )(.+)$", re.MULTILINE)


class OneLineParser(LightningArgumentParser):
    """``LightningArgumentParser`` whose errors are one line, without the usage: that names a hundred options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, and exit with 2. What jsonargparse catches, in parsers of its own, stays as it is."""
        if self.exit_on_error:
            message = _in_one_line(message, _options(getattr(ex, "subcommand_parser", None) or self))
        super().error(message, ex)

    def print_usage(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """Print the usage, but not in front of an error."""
        if file is not sys.stderr:
            super().print_usage(file)


def no_strategy(found: str) -> str:
    """What to say of a strategy that does not exist."""
    names = ["auto", *StrategyRegistry.available_strategies(), "lightning_zero.ZeroStrategy"]
    ours = ", ".join(name for name in names if name.startswith("zero"))
    theirs = ", ".join(name for name in names if "_" not in name and not name.startswith("zero"))
    there_are = f"There are {ours}, and Lightning's {theirs}, ..."
    if found.startswith("{"):
        return f"trainer.strategy: expected a name, or class_path and init_args, found {found}. {there_are}"
    return f"trainer.strategy: there is no strategy {found!r}.{_meant(found, names)} {there_are}"


def refused_by_the_class(message: str) -> str | None:
    """What a class of this package says of its arguments, in a message of jsonargparse; ``None`` if it was another."""
    reason = _REASON.search(message)
    ours = re.search(r"^Given value: .*class_path='lightning_zero\.", message, re.MULTILINE)
    return f"trainer.strategy: {reason[1]}" if ours and reason else None


def _in_one_line(message: str, options: Sequence[str] = ()) -> str:
    """A message of jsonargparse, said shortly: the key, what is wrong with it, and what may have been meant.

    Of the branches the deepest counts: the others failed before they came to the setting. ``options`` are the names
    that the parser knows.
    """
    if not (_KEY.match(message) or _UNKNOWN.match(message)):
        return " ".join(message.split())
    lines = [line for line in message.splitlines() if line.strip()]
    depths = [len(line) - len(line.lstrip(" -")) for line in lines]
    lines = [line.strip(" -") for line in lines]
    first = depths.index(max(depths))
    way = [i for i in range(first + 1) if depths[i] < min([*depths[i + 1 : first + 1], depths[i] + 1])]
    keys = [found[1] for i in way if (found := _KEY.match(lines[i]))]
    owner = next((found[1] for i in reversed(way) if (found := _OWNER.match(lines[i]))), "")
    leaves = {_KEY.sub("", line): None for line, depth in zip(lines, depths, strict=True) if depth == depths[first]}
    text, key = " ".join(leaves), ".".join(keys)
    if unknown := _UNKNOWN.match(text):
        return _unknown(keys, owner, ".".join(filter(None, unknown.groups())), text, options)
    found = _FOUND.search("\n".join(lines[first:]))
    value = (found[1] or found[2] or "") if found else ""
    no_class = _NO_CLASS.search(text)
    if key == "trainer.strategy":
        return no_strategy(owner or (no_class[1] if no_class else value))
    expected = _EXPECTED.match(next(iter(leaves)))
    others = [leaf for leaf in leaves if not leaf.startswith("Expected ")]
    if others or not (expected or no_class):
        return f"{key}: {' '.join(others) or text}{f', found {value!r}' * bool(value)}."
    subtypes = [line for line in lines[:first] if line.startswith("Subtypes: [")]
    types = subtypes[-1][11:-1] if len(leaves) > 1 and subtypes else expected[1] if expected else "a class path"
    types = _TYPE.sub(lambda part: part[1] or part[2] or "", types).replace("NoneType", "null")
    choices = [name for choice in re.findall(r"[\w.-]+", types) for name in (choice, choice.rpartition(".")[2])]
    return f"{key}: expected {'one of ' * (', ' in types)}{types}, found {value!r}.{_meant(value, choices)}"


def _unknown(keys: list[str], owner: str, name: str, text: str, options: Sequence[str]) -> str:
    """A key that does not exist, of a class or of the parser."""
    if not owner:
        return f"{text}.{_meant(name, options)}"
    options = _options_of(owner)
    meant = _meant(name, options) or (f" There are {', '.join(options)}." if options else "")
    if owner == "lightning.LightningModule":  # what stands for a class that is not said
        meant = " The configuration does not say which class the model is of: give it, as in --model my_module.MyModel."
    return f"{'.'.join(keys)}: {owner} has no argument {name!r}.{meant}"


def _meant(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _options_of(path: str) -> list[str]:
    """The arguments of a class, as jsonargparse finds them; none where that fails: this is about another error."""
    module, _, name = path.rpartition(".")
    parser = LightningArgumentParser(exit_on_error=False)
    with suppress(Exception):
        parser.add_class_arguments(getattr(importlib.import_module(module), name), fail_untyped=False)
    return _options(parser)


def _options(parser: ArgumentParser) -> list[str]:
    names = [name.lstrip("-") for action in parser._actions for name in action.option_strings if name.startswith("--")]
    return [name for name in names if not name.endswith(("help", "+"))]
