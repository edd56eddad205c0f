"""Break the core in one place at a time, and see whether the default suite finds it: ``python -m tests.mutations``.

A mutation changes an operator, a condition, a call, a group or a divisor. Which ones is a fixed choice of ``--seed``.
One run of the suite on a copy that notes what it passes tells which tests reach each place; then those tests alone play
each mutation, the quickest first, until one fails. ``--record FILE`` keeps what was found: a later run with it
tries the test that found a mutation before the others. It takes about an hour on two idle cores, less with a record.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

__all__ = ["KINDS", "Mutation", "mutations_of", "table"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_zero"
# How many of each kind.
KINDS = {"operator": 15, "condition": 18, "removed call": 17, "wrong group": 5, "wrong divisor": 5}
DEADLINE = 3600.0  # seconds for a run of tests. Each test has its own, where a hang is found

_OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_GROUPS = {"gather": "reduce", "reduce": "gather", "shard": "control", "control": "shard", "checkpoint": "control"}
# Calls that only say something, or without which nothing is made at all.
_LEFT = {"warn", "rank_zero_warn", "rank_zero_info", "info", "debug", "warning", "print", "__init__"}


class Mutation(NamedTuple):
    """Another text between two places of a file."""

    kind: str
    file: str
    line: int
    start: int  # of the text in the file, in bytes
    end: int
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} [{self.kind}] {' '.join(self.was.split())} -> {' '.join(self.now.split())}"


def mutations_of(name: str, text: str) -> Iterator[Mutation]:
    """Every mutation of a file. Errors, annotations, defaults and what is only said are left as they are."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def mutation(kind: str, node: Any, now: ast.AST | str) -> Mutation:
        start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
        new = now if isinstance(now, str) else f"({ast.unparse(now)})"
        return Mutation(kind, name, node.lineno, start, end, text.encode()[start:end].decode(), new)

    def changed(node: Any, **fields: Any) -> Any:
        node = copy.deepcopy(node)
        for field, value in fields.items():
            setattr(node, field, value)
        return node

    def walk(node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            return
        if isinstance(node, ast.FunctionDef):
            if node.name not in ("__repr__", "__str__"):
                for statement in node.body:
                    yield from walk(statement)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from walk(node.value)
            return
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in _OPERATORS:
                yield mutation("operator", node, changed(node, ops=[_OPERATORS[type(operator)]()]))
            case ast.BinOp(op=ast.Div() | ast.FloorDiv()) if not _is_text(node):
                yield mutation("wrong divisor", node, changed(node, right=_one_more(node.right)))
            case ast.BinOp(op=operator) if type(operator) in _OPERATORS and not _is_text(node):
                yield mutation("operator", node, changed(node, op=_OPERATORS[type(operator)]()))
            case ast.Call(func=ast.Attribute(attr="div" | "div_"), args=[divisor, *others]):
                yield mutation("wrong divisor", node, changed(node, args=[_one_more(divisor), *others]))
            case ast.BoolOp(op=operator):
                other = ast.Or() if isinstance(operator, ast.And) else ast.And()
                yield mutation("condition", node, changed(node, op=other))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                if "TYPE_CHECKING" not in ast.unparse(test):
                    yield mutation("condition", test, ast.UnaryOp(ast.Not(), test))
            case ast.Attribute(attr="divisor", ctx=ast.Load()):
                yield mutation("wrong divisor", node, _one_more(node))
            case ast.Attribute(attr=attribute, value=value, ctx=ast.Load()) if attribute in _GROUPS:
                if ast.unparse(value).rpartition(".")[2] in ("groups", "across"):
                    yield mutation("wrong group", node, changed(node, attr=_GROUPS[attribute]))
            case ast.Expr(value=ast.Call(func=function)):
                if ast.unparse(function).rpartition(".")[2] not in _LEFT:
                    yield mutation("removed call", node, "None")
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(text))


def _is_text(node: ast.BinOp) -> bool:
    """Whether it adds strings, or joins parts of a path."""
    if isinstance(node.op, ast.Div) and re.search(r"path|file|folder|directory|root|name", ast.unparse(node), re.I):
        return True
    sides = [side for side in ast.walk(node) if isinstance(side, (ast.Constant, ast.JoinedStr))]
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def _one_more(node: Any) -> ast.BinOp:
    return ast.BinOp(copy.deepcopy(node), ast.Add(), ast.Constant(1))


def chosen(root: Path, seed: int) -> list[Mutation]:
    """The same of each kind for the same seed and the same source."""
    found: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "/extensions/" not in name:
            for mutation in mutations_of(name, path.read_text(encoding="utf-8")):
                found[mutation.kind].append(mutation)
    draw = random.Random(seed)
    return [
        mutation for kind, many in KINDS.items() for mutation in draw.sample(found[kind], min(many, len(found[kind])))
    ]


def table(found: dict[Mutation, bool]) -> str:
    """How many of each kind were found, as Markdown."""
    rows = ["| kind | mutations | found |", "| --- | --- | --- |"]
    for kind in KINDS:
        of_kind = [was for mutation, was in found.items() if mutation.kind == kind]
        rows.append(f"| {kind} | {len(of_kind)} | {sum(of_kind)} |")
    rows.append(f"| all | {len(found)} | {sum(found.values())} ({sum(found.values()) / max(1, len(found)):.0%}) |")
    return "\n".join(rows)


# --------------------------------------------------------------------------------- as a plugin, in the run that notes


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    os.environ["MUTATIONS_TEST"] = nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["MUTATIONS_TIMES"], "a", encoding="utf-8") as file:
            print(json.dumps([report.nodeid, report.duration, report.outcome]), file=file)


_NOTE = """
def _note():
    import builtins, os
    seen = set()
    def passed(number):
        test = os.environ.get("MUTATIONS_TEST", "")
        if (number, test) not in seen and "MUTATIONS_HITS" in os.environ:
            seen.add((number, test))
            file = os.open(os.environ["MUTATIONS_HITS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{number} {test}\\n".encode())
            os.close(file)
        return True
    builtins.mutation_passed = passed
_note()
"""


def _noting(root: Path, mutations: list[Mutation]) -> None:
    """Have each place of the copy note that a test passes it."""
    of_file: dict[str, list[tuple[int, Mutation]]] = defaultdict(list)
    for number, mutation in enumerate(mutations):
        of_file[mutation.file].append((number, mutation))
    for name, places in of_file.items():
        data = (root / name).read_bytes()
        inserts = [(mutation.start, f"(mutation_passed({number}) and (") for number, mutation in places]
        inserts += [(mutation.end, "))") for _, mutation in places]
        for at, text in sorted(inserts, reverse=True):
            data = data[:at] + text.encode() + data[at:]
        (root / name).write_bytes(data)
    init = root / PACKAGE / "__init__.py"
    first = "from __future__ import annotations\n"
    head, future, tail = init.read_text(encoding="utf-8").partition(first)
    assert future, f"{init} does not begin as others do"
    init.write_text(head + future + _NOTE + tail, encoding="utf-8")


def _pytest(root: Path, *arguments: str, deadline: float, **environment: str) -> tuple[int, str]:
    """Run it in a copy, in a session of its own that is ended with it."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    variables["PYTHONPATH"] = str(root)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        with open(f"{folder}/output", "w+", encoding="utf-8", errors="replace") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = subprocess.Popen(
                [*command, *arguments], cwd=root, env=variables, start_new_session=True, **streams
            )
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()


def _copied(to: Path) -> Path:
    files = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def _reached(root: Path, mutations: list[Mutation]) -> list[list[str]]:
    """The tests that pass the place of each mutation, the quickest first."""
    _noting(root, mutations)
    hits, times = root / "hits", root / "times"
    hits.touch()
    code, said = _pytest(
        root,
        "-n",
        "2",
        "-p",
        "tests.mutations",
        deadline=DEADLINE,
        MUTATIONS_HITS=str(hits),
        MUTATIONS_TIMES=str(times),
    )
    if code != 0:
        print(f"Without a mutation the suite fails:\n{textwrap.indent(said[-3000:], '    ')}", file=sys.stderr)
    took: dict[str, float] = defaultdict(float)
    passed: dict[str, bool] = defaultdict(lambda: True)
    for line in times.read_text(encoding="utf-8").splitlines():
        test, seconds, outcome = json.loads(line)
        took[test] += seconds
        passed[test] &= outcome != "failed"
    reached: list[set[str]] = [set() for _ in mutations]
    for line in hits.read_text(encoding="utf-8").splitlines():
        number, _, test = line.partition(" ")
        reached[int(number)] |= {test} if test else set(took)  # while modules were imported: all tests saw that
    return [sorted((test for test in tests if passed[test]), key=lambda test: took[test]) for tests in reached]


def _play(root: Path, mutation: Mutation, tests: list[str]) -> tuple[str, float]:
    """The first of the tests that fails, or nothing, and after how many seconds."""
    path = root / mutation.file
    before = path.read_bytes()
    began = time.monotonic()
    try:
        path.write_bytes(before[: mutation.start] + mutation.now.encode() + before[mutation.end :])
        listed = root / "listed"
        listed.write_text("\n".join(tests) + "\n", encoding="utf-8")
        code, said = _pytest(root, "-x", f"@{listed}", deadline=DEADLINE)
    finally:
        path.write_bytes(before)
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code <= 0:  # all passed, or took too long together
        found = ""
    elif lines:
        found = lines[0].partition(" ")[2].partition(" - ")[0]
    else:
        found = "cannot be imported" if code in (1, 2, 3, 4) else f"exit {code}"
    return found, time.monotonic() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=41, help="which mutations")
    parser.add_argument("--least", type=float, default=0.85, help="the share that has to be found")
    parser.add_argument("--record", type=Path, help="a file of JSON: read if it is there, and written")
    parser.add_argument("--list", action="store_true", help="say the mutations, and play none")
    options = parser.parse_args(arguments)
    mutations = chosen(ROOT, options.seed)
    if options.list:
        print(*mutations, sep="\n")
        return 0
    known = json.loads(options.record.read_text()) if options.record and options.record.exists() else {}
    found: dict[Mutation, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for name in ("first", "second"):
            copies.put(_copied(Path(folder, name)))

        def play(mutation: Mutation, tests: list[str]) -> str:
            root = copies.get()
            try:
                by, seconds = _play(root, mutation, tests) if tests else ("", 0.0)
            finally:
                copies.put(root)
            print(f"{mutation}: {by or f'NOT FOUND by {len(tests)} tests'} ({seconds:.0f} s)", flush=True)
            return by

        with ThreadPoolExecutor(2) as pool:
            again = [m for m in mutations if _is_test(known.get(str(m), ""))]
            for mutation, by in zip(again, pool.map(lambda m: play(m, [known[str(m)]]), again), strict=True):
                if by:
                    found[mutation] = by
            rest = [mutation for mutation in mutations if mutation not in found]
            reached = _reached(_copied(Path(folder, "noting")), rest) if rest else []
            for mutation, by in zip(rest, pool.map(play, rest, reached), strict=True):
                found[mutation] = by
                if options.record:
                    options.record.write_text(json.dumps({str(m): b for m, b in found.items()}, indent=1))
    print("\nNot found:", *(mutation for mutation in mutations if not found[mutation]), sep="\n")
    print(table({mutation: bool(found[mutation]) for mutation in mutations}))
    return 0 if sum(map(bool, found.values())) >= options.least * len(mutations) else 1


def _is_test(name: str) -> bool:
    path = name.partition("::")[0]
    return (
        "::" in name
        and (ROOT / path).exists()
        and name.partition("::")[2].partition("[")[0] in (ROOT / path).read_text()
    )


if __name__ == "__main__":
    sys.exit(main())
