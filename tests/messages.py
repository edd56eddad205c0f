"""The page of messages, read from the code that raises them: ``python -m tests.messages --page`` writes it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lightning_zero import errors

__all__ = ["first_words", "messages", "page"]

ROOT = Path(__file__).parents[1]
OURS = [name for name in errors.__all__ if inspect.isclass(getattr(errors, name)) and name != "ZeroError"]
_WORDS = 20  # of a message, at most, on the page
_HEAD = """# Messages by class

The traceback of each of this package's errors ends with the address of its section here. `ZeroError` is the base class.
The list has the first words of each message, with `...` for a name, a rank or a number, and a link where
[troubleshooting](troubleshooting.md) says more. Wrong settings and calls in a wrong order raise Python's own classes
(`ValueError`, `TypeError`, `RuntimeError`), whose messages say what to write instead.

`python -m tests.messages --page` writes this page, from the code that raises them.
"""


def messages() -> dict[str, set[str]]:
    """The first words of each message, by the class that is raised."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in sorted((ROOT / "lightning_zero").rglob("*.py")):
        for function, call in _calls(ast.parse(file.read_text(encoding="utf-8"))):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in OURS:
                texts = (text for argument in call.args for text in _texts(argument, function))
                found[name] |= {words for text in texts if (words := first_words(text))}
    return dict(found)


def first_words(text: str) -> str:
    """The first sentence of a message, or its beginning; nothing if there are not even three words."""
    text = re.sub(r"(\.\.\.[\s'\"]*)+(?=\.\.\.)", "", " ".join(text.split()))
    sentence = re.split(r"(?<=[^.]\.) |(?<=\.\.\.\.) |: (?=\.\.\.$)", text)[0]
    words = sentence.split()
    if len([word for word in words if re.search(r"[a-z]{2}", word)]) < 3:
        return ""
    return " ".join(words[:_WORDS]) + (" ..." if len(words) > _WORDS and words[_WORDS - 1] != "..." else "")


def page() -> str:
    """The page, in Markdown."""
    explained = re.findall(
        r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    found, parts = messages(), [_HEAD]
    for name in OURS:
        parts += [f"## {name}\n", f"{_about(getattr(errors, name).__doc__)}\n"]
        for words in sorted(found[name], key=lambda words: (re.sub(r"\W", "", words).lower(), words)):
            heading = next((one for one in explained if _core(one) in words or _core(words) in one), None)
            more = f" ([more](troubleshooting.md#{_slug(heading)}))" if heading else ""
            parts.append(f"- `` {words} ``{more}" if "`" in words else f"- `{words}`{more}")
        parts.append("")
    return "\n".join(parts)


def _about(docstring: str | None) -> str:
    return re.sub(r"``", "`", inspect.cleandoc(docstring or ""))


def _core(words: str) -> str:
    """The longest part of a message without what is filled in."""
    return max(words.split("..."), key=len).strip()


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _calls(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Every call, with the innermost function that it is in."""

    def walk(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            yield from walk(child, child if isinstance(child, ast.FunctionDef) else function)

    return walk(tree, tree)


def _texts(node: ast.expr, function: ast.AST) -> list[str]:
    """What an argument may say: ``...`` for what is filled in, each branch of a condition, each value of a variable."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, function), *_texts(node.orelse, function)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        ends = _texts(node.right, function) or ["..."]
        return [begin + end for begin in _texts(node.left, function) or ["..."] for end in ends]
    if isinstance(node, ast.Name):
        given = [a for a in ast.walk(function) if isinstance(a, ast.Assign) and ast.unparse(a.targets[0]) == node.id]
        return [text for a in given if not isinstance(a.value, ast.Name) for text in _texts(a.value, function)]
    return []


if __name__ == "__main__":
    if sys.argv[1:] != ["--page"]:
        raise SystemExit(__doc__)
    (ROOT / "docs" / "messages.md").write_text(page(), encoding="utf-8")
