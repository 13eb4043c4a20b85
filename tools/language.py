"""Check names, docstrings, and comments by the language rules (CONTRIBUTING, "Names and docstrings")."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Documented = _Function | ast.ClassDef | ast.Module

_WORDS = Path(__file__).with_name("language_words.txt")
_PREDICATES = frozenset(
    ["is", "has", "can", "was", "are", "should", "needs", "owns", "uses", "supports", "allows"]
)
_PREFIXES = frozenset(["to", "from", "as", "on", "num", "test", "visit", "with"])
_JOINTS = frozenset(["from", "for", "to", "per"])
_DECORATED = re.compile(
    r"property|setter|overload|fixture|contextmanager|given|composite|law\b|register|\.add\b|\.impl\b"
)
_CLAUSE = re.compile(r"\b(what|who|whoever|whose|whom)\b(?!-)|;", re.IGNORECASE)
_ONLY_A_DECISION = re.compile(r"#\s*(why: )?\(?decisions/\d{4}\)?\.?\s*$")


def read_words(path: Path = _WORDS) -> dict[str, frozenset[str]]:
    """Read the word lists: a line `[name]` starts each list, and `#` starts a comment."""
    words: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("["):
            current = words.setdefault(text.strip("[]"), set())
        else:
            current.update(text.split())
    return {name: frozenset(each) for name, each in words.items()}


WORDS = read_words()


def check_language(text: str) -> list[str]:
    """Return one text for each name, docstring, or comment that breaks a rule."""
    problems = [*_check_tree(ast.parse(text)), *_check_comments(text)]
    return [f"{line}: {problem}" for line, problem in sorted(problems)]


def _check_tree(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, _Function) and (problem := _check_name(node)):
            yield node.lineno, problem
        if isinstance(node, _Documented) and (docstring := ast.get_docstring(node)):
            yield from ((node.body[0].lineno, each) for each in _check_docstring(node, docstring))


def _check_name(node: _Function) -> str | None:
    """Return the problem of a function's name, if it has one."""
    name = node.name.lstrip("_")
    words = name.split("_")
    if node.name.startswith("__") or name in WORDS["names"]:
        return None
    if words[-1] == "of":
        return f"the name {node.name} ends in 'of'"
    if words[0] in WORDS["verbs"]:
        return None
    if words[0] in _PREDICATES | _PREFIXES and len(words) > 1:
        return None
    if words[0] in WORDS["prepositions"] | WORDS["pronouns"]:
        return f"the name {node.name} starts with {words[0]!r}: start with a verb"
    if _is_decorated(node):
        return f"the name {node.name} is no noun" if len(words) == 1 and _is_participle(name) else None
    if _JOINTS & set(words[1:-1]) and not _is_participle(words[0]):
        return None  # compiler_from_options, layout_map_for_point
    return f"the name {node.name} does not start with a verb (tools/{_WORDS.name})"


def _is_decorated(node: _Function) -> bool:
    """Return whether a decorator makes an attribute, a context, or an entry of a table."""
    return any(_DECORATED.search(ast.unparse(each)) for each in node.decorator_list)


def _is_participle(word: str) -> bool:
    return bool(re.fullmatch(r"\w+(ed|ing)", word)) or word in WORDS["participles"]


def _check_docstring(node: _Documented, docstring: str) -> Iterator[str]:
    """Yield the problems of a docstring's first paragraph. The docstring of a test states a law."""
    first = docstring.split("\n\n")[0]
    if found := _CLAUSE.search(re.sub(r"`[^`]*`", "", first)):
        yield f"the docstring has {found[0]!r}: write one fact per sentence"
    if not isinstance(node, _Function) or node.name.startswith("test") or _is_decorated(node):
        return
    start = first.split()[0].strip(".,:`*").lower()
    if start not in WORDS["verbs"] | WORDS["docstring verbs"]:
        yield f"the docstring starts with {first.split()[0]!r}: start with a verb"


def _check_comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _ONLY_A_DECISION.match(token.string):
            yield token.start[0], "the comment only cites a decision: state the cause and the consequence"


def main(paths: Sequence[str]) -> int:
    """Print the problems of files or folders."""
    files = [
        file
        for path in paths
        for file in ([Path(path)] if path.endswith(".py") else sorted(Path(path).rglob("*.py")))
    ]
    found = [f"{file}:{each}" for file in files for each in check_language(file.read_text(encoding="utf-8"))]
    print(*found, f"{len(found)} problems of language in {len(files)} files", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:] or ["src"]))
