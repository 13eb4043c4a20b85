"""The notebooks of the documentation, run from the first cell to the last: they print what is checked in.

python tests/test_notebooks.py      run them and write what they print
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import frameworks
import nbformat
import pytest

PROCESSES = ("jax",)
NOTEBOOKS = sorted((frameworks.ROOT / "docs" / "notebooks").glob("*.ipynb"))


def run(path: Path, folder: Path) -> Any:
    """The notebook with what it prints, run in an empty folder."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    env = {**os.environ, "IPYTHONDIR": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
    here = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=280, coalesce_streams=True, resources=here)
    return client.execute(env=env)


def shown(notebook: Any) -> list[list[Any]]:
    """What each cell shows, but for what the libraries say on stderr."""
    return [
        [output.get("text") or output["data"] for output in cell.outputs if output.get("name") != "stderr"]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.long  # they start kernels, which import two frameworks
@pytest.mark.filterwarnings("default")  # of what runs kernels, not of ours: a cell's own are in its output
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_shows_what_is_checked_in(path: Path, tmp_path: Path):
    """Each cell runs, and shows what a reader sees in the repository and on the site."""
    assert shown(nbformat.read(path, as_version=4)) == shown(run(path, tmp_path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_was_run_from_the_first_cell_to_the_last(path: Path):
    """It is valid, its cells are counted from 1, none says anything on stderr, and it keeps no times and no paths."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [*range(1, len(cells) + 1)] == [cell.execution_count for cell in cells]
    assert [] == [
        o for cell in cells for o in cell.outputs if o.get("name") == "stderr" or o.output_type == "error"
    ]
    assert [{}] * len(notebook.cells) == [cell.metadata for cell in notebook.cells]


def write() -> None:
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, Path(folder))
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
