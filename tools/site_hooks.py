"""Prepare the site besides mkdocs: linked files outside of docs/, notebooks, and GitHub's Markdown."""

# Pages must work on GitHub and as a site, so this small hook converts notebooks and links (decisions/0089).
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# A link to a file of the repository, as a page of any depth writes it.
OUTSIDE = re.compile(
    r"\]\(((?:\.\./)+)((?:examples|src|tests|tools|benchmarks)/[^)#]+|[A-Z]+\.md|pyproject\.toml)"
)
# What the opening line of a block says to the tests. Python-Markdown takes such a line for prose.
NO_RUN = re.compile(r"(^ *```+\w+) no-run:.*$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository that pages link to, and a page for each notebook."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = File.generated(
            config,
            replace_notebook_suffix(notebook.src_uri),
            content=convert_notebook(notebook.content_string),
        )
        files.append(page)
    linked = {
        match[2]
        for page in (ROOT / "docs").rglob("*.md")
        for match in OUTSIDE.finditer(page.read_text(encoding="utf-8"))
        if (page.parent / match[1] / match[2]).resolve() == ROOT / match[2]
    }
    for name in sorted(linked):
        if (ROOT / name).is_file():
            files.append(File.generated(config, f"files/{name}.txt", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ to copies in the site, and rank decisions last in its search."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.1}
    up = "../" * page.file.src_uri.count("/")

    def replace_link(match: re.Match[str]) -> str:
        return f"]({up}files/{match[2]}.txt" if (ROOT / match[2]).is_file() else match[0]

    return replace_notebook_suffix(NO_RUN.sub(r"\1", OUTSIDE.sub(replace_link, markdown)))


def replace_notebook_suffix(text: str) -> str:
    """Return a path or a text with notebooks linked as pages."""
    return re.sub(r"\.ipynb(?=$|\))", ".md", text)


def convert_notebook(notebook: str) -> str:
    """Return a notebook as Markdown: text, code, and the output of each cell."""
    parts: list[str] = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text")})
            if "text/html" in data:
                parts.append(f'<div class="output">{"".join(data["text/html"])}</div>')
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
