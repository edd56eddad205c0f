"""``ZeroCLI``: the Trainer's command line, for scripts and for ``lightning-zero fit``, with errors in one line."""

from __future__ import annotations

import importlib
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.trainer.foreign import answer, did_you_mean

__all__ = ["DEFAULT_STRATEGY", "ZeroCLI", "classes_first"]

DEFAULT_STRATEGY = "zero3"

_CLASS = re.compile(r"--(model|data|data\.class_path|optimizer|lr_scheduler)(=|$)")


class OneLineParser(LightningArgumentParser):
    """``LightningArgumentParser`` whose errors are one line, without the usage: that names a hundred options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, and exit with 2. What jsonargparse catches, in parsers of its own, stays as it is."""
        if self.exit_on_error:
            parser = getattr(ex, "subcommand_parser", None) or self
            parser.usage = SUPPRESS
            message = in_one_line(message, parser._options_of, StrategyRegistry.available_strategies())
        super().error(message, ex)

    def _options_of(self, path: str) -> list[str]:
        """The names that this parser knows, or (of a path) a class's arguments; none where those cannot be found."""
        parser = LightningArgumentParser(exit_on_error=False) if path else self
        module, _, name = path.rpartition(".")
        with suppress(Exception):  # this is about another error
            parser.add_class_arguments(getattr(importlib.import_module(module), name), fail_untyped=False)
        names = [name[2:] for action in parser._actions for name in action.option_strings if name.startswith("--")]
        return [name for name in names if not name.endswith(("help", "help-all", "+"))]


class ZeroCLI(LightningCLI):
    """``LightningCLI`` with the ZeRO strategies registered and ``zero3`` as the default strategy.

    Takes what ``LightningCLI`` takes; ``trainer_defaults`` and the configuration override the default strategy. An
    option or a setting that does not exist ends the program with one line that names it, and what may have been meant.
    """

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make the parser, which says errors in one line unless ``parser_class`` is another."""
        if self.parser_class is LightningArgumentParser:
            self.parser_class = OneLineParser
        parser = super().init_parser(**kwargs)
        parser.add_argument("--help-all", action="help", help="Show this help.")
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what ``LightningCLI`` adds."""
        self.trainer_defaults = {"strategy": DEFAULT_STRATEGY, **self.trainer_defaults}
        super().add_core_arguments_to_parser(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, or the process's own: a class may stand before and behind a configuration with its arguments.

        Raises SystemExit for wrong options.
        """
        commands = self.subcommands()
        if args is None:  # given to `parse_args` as a list, they would count as a script's own
            self.config = parser.parse_args(classes_first(sys.argv[1:], commands))
        else:
            super().parse_arguments(
                parser, args if isinstance(args, dict | Namespace) else classes_first(args, commands)
            )

    def instantiate_classes(self) -> None:
        """Make what is configured. Raises SystemExit for a strategy that does not exist, or that refuses a setting."""
        self._check_strategy()
        try:
            super().instantiate_classes()
        except ValueError as error:
            if (refusal := refused_by_the_class(str(error))) is None:
                raise  # what the user's classes raise is theirs
            self.parser.error(refusal)

    def _check_strategy(self) -> None:
        command, names = self.config.get("subcommand"), StrategyRegistry.available_strategies()
        strategy = self.config.get(f"{command}.trainer.strategy" if command else "trainer.strategy")
        if isinstance(strategy, str) and strategy.lower() not in ("auto", *names):
            self.parser.error(no_strategy(strategy, names))


# --------------------------------------------------------------------------------------------------- what is configured


def classes_first(args: Sequence[str], commands: Collection[str]) -> list[str]:
    """The command line with the classes of model, data, optimizer and schedule in front too, behind the command.

    A configuration may have arguments of a class that only the command line names. Their class has to be known before
    they are read; what comes last still wins.
    """
    begin = 1 + next(
        (i for i, arg in enumerate(args) if arg in commands and not re.match("--[^=]+$", args[i - 1] if i else "")), -1
    )
    named: list[str] = []
    for index, arg in enumerate(args):
        if _CLASS.match(arg):
            named += args[index : index + (1 if "=" in arg else 2)]
    return [*args[:begin], *named, *args[begin:]]


# ------------------------------------------------------------------------------------------------ errors in one line

# The parts of jsonargparse's messages: a tree, indented, with a branch for each type that a value may have.
_KEY = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN = re.compile(r"(?:Group '(.+)' .+ |(?:Subc.+ o|O)ption |unrecognized arguments: --)'?([\w.-]+)")
_NO_CLASS = re.compile(r"Expected a dot import path string: (.+)")
_EXPECTED = re.compile(r"Expected an? ((?:<class|typing\.).+?)(?:\. Got value: .*)?$")
_FOUND = re.compile(r"(?:Got|Given) value: (?:NestedArg\(key='.+?', val='(.*)'\)|(.*))$", re.MULTILINE)
_TYPE = re.compile(r"<class '([\w.]+)'>|typing\.(?:Literal\[(.+?)\])?")
_NAMELESS = " Nothing says which class the model is of: give it, as in --model my_module.MyModel."
_REASON = re.compile(r"^ *- (?!Expected |Does not validate )(.+)$", re.MULTILINE)


def no_strategy(found: str, registered: Iterable[str]) -> str:
    """What to say of a strategy that does not exist; ``registered`` are those that do."""
    names = ["auto", *registered, "lightning_zero.ZeroStrategy"]
    ours = ", ".join(name for name in names if re.match("zero[0-9](?!.*-)", name))  # without other spellings
    theirs = ", ".join(name for name in names if "_" not in name and not name.startswith("zero"))
    there_are = f"There are {ours}, and Lightning's {theirs}, ..."
    if found.startswith("{"):
        return f"trainer.strategy: expected a name, or class_path and init_args, found {found}. {there_are}"
    return f"trainer.strategy: there is no strategy {found!r}.{did_you_mean(found, names)} {there_are}"


def refused_by_the_class(message: str) -> str | None:
    """What a class of this package says of its arguments, in a message of jsonargparse; ``None`` if it was another."""
    reason = _REASON.search(message)
    ours = re.search(r"^Given value: .*class_path='lightning_zero\.", message, re.MULTILINE)
    return f"trainer.strategy: {reason[1]}" if ours and reason else None


def in_one_line(message: str, options_of: Callable[[str], list[str]], strategies: Iterable[str]) -> str:
    """A message of jsonargparse, said shortly: the key, what is wrong with it, and what may have been meant.

    Of the branches the deepest counts: the others failed before they came to the setting. ``options_of`` says what a
    class may be given, or (of an empty path) the parser, and ``strategies`` are the registered ones.
    """
    if not (_KEY.match(message) or _UNKNOWN.match(message)):
        nameless = re.search(r"are required: (\w+\.)?model$", message)
        return " ".join(message.split()) + (f".{_NAMELESS}" if nameless else "")
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
        name, options = ".".join(filter(None, unknown.groups())), options_of(owner)
        if not owner:
            return f"{text}.{did_you_mean(name, options)}"
        near = answer(name, options) if owner.startswith("lightning_zero.") else did_you_mean(name, options)
        meant = near or f" There are {', '.join(options)}."
        unnamed = owner == "lightning.LightningModule"  # what stands for a class that is not said
        return f"{key}: {owner} has no argument {name!r}.{_NAMELESS if unnamed else meant}"
    found = _FOUND.search("\n".join(lines[first:]))
    value = (found[1] or found[2] or "") if found else ""
    no_class = _NO_CLASS.search(text)
    if key == "trainer.strategy":
        return no_strategy(owner or (no_class[1] if no_class else value), strategies)
    expected = _EXPECTED.match(next(iter(leaves)))
    others = [leaf for leaf in leaves if not leaf.startswith("Expected ")]
    if others or not (expected or no_class):
        return f"{key}: {' '.join(others) or text}{f', found {value!r}' * bool(value)}."
    subtypes = [line for line in lines[:first] if line.startswith("Subtypes: [")]
    types = subtypes[-1][11:-1] if len(leaves) > 1 and subtypes else expected[1] if expected else "a class path"
    types = _TYPE.sub(lambda part: part[1] or part[2] or "", types).replace("NoneType", "null")
    choices = [name for choice in re.findall(r"[\w.-]+", types) for name in (choice, choice.rpartition(".")[2])]
    return f"{key}: expected {'one of ' * (', ' in types)}{types}, found {value!r}.{did_you_mean(value, choices)}"
