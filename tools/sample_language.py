"""Draw names, docstrings, comments, error messages, and paragraphs of docs for a reader new to this code.

    python tools/sample_language.py SEED

A reading is good if the reader finds clear 54 of 60 names, 54 of 60 docstrings, 36 of 40 comments, 28 of 30 messages,
and 18 of 20 paragraphs.
"""

from __future__ import annotations

import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"names": 60, "docstrings": 60, "comments": 40, "messages": 30, "paragraphs": 20}
_DIRECTIVE = re.compile(r"#\s*(pyright|noqa|type:|fmt:)")


def list_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the signature of each function and class."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, f"class {node.name}"
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            yield node.lineno, f"{node.name}({ast.unparse(node.args)})"


def list_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first paragraph of each docstring, after the name of its function or class."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (docstring := ast.get_docstring(node)):
            first = " ".join(docstring.split("\n\n")[0].split())
            yield node.body[0].lineno, f"{node.name}: {first}"


def list_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment, after the code on its line. Adjacent lines are one comment."""
    lines = text.splitlines()
    comments: dict[int, str] = {}
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        line, column = token.start
        code = lines[line - 1][:column].strip()
        if (
            comments
            and not code
            and line == last + len(comments[last].splitlines())
            and "  #" not in comments[last]
        ):
            comments[last] += f"\n{token.string}"
        else:
            comments[line] = f"{code}  {token.string}" if code else token.string
            last = line
    for line, comment in comments.items():
        yield line, comment


def list_messages(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the call of each error that is raised with a text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.lineno, ast.unparse(node.exc)


def list_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph of prose in a page."""
    line = 1
    for block in re.split(
        r"\n\n", re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.S)
    ):
        if len(block.split()) > 15 and not block.lstrip().startswith(("|", "#", "<", "!", "?", "Named in")):
            yield line, block.strip()
        line += block.count("\n") + 2


def draw(seed: int) -> dict[str, list[str]]:
    """Return the drawn texts of each kind, each after its place."""
    sources = [each for each in sorted((ROOT / "src").rglob("*.py")) if not each.stem.endswith("_pb2")]
    pages = sorted((ROOT / "docs").rglob("*.md"))
    listers = dict(
        zip(SIZES, (list_names, list_docstrings, list_comments, list_messages, list_paragraphs), strict=True)
    )
    drawn: dict[str, list[str]] = {}
    for kind, lister in listers.items():
        found = [
            f"{path.relative_to(ROOT)}:{line}: {text}"
            for path in (pages if kind == "paragraphs" else sources)
            for line, text in lister(path.read_text(encoding="utf-8"))
        ]
        drawn[kind] = random.Random(f"{seed} {kind}").sample(found, SIZES[kind])
    return drawn


def main(arguments: list[str]) -> int:
    """Print the drawn texts, numbered."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print(__doc__)
        return 2
    for kind, texts in draw(int(arguments[0])).items():
        print(f"\n## {kind}\n", *(f"{number}. {text}" for number, text in enumerate(texts, 1)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
