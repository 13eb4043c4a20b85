"""With `scope(rows="own")` each process passes its own rows, and the numbers are those of all rows on one device."""

from pathlib import Path

import pytest
from engines import several_processes

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("torch_own_rows_process.py")
CASES = {2: ["batch=2"], 4: ["batch=4", "batch=2,model=2"]}
REFUSED = {
    "no batch_dim": 'rows="own": the scope has no batch_dim',
    "a choice": "rows='mine': this value is not allowed",
    "the global batch": "all processes pass the same rows",
    "own rows in the other mode": "the processes pass different batches",
    "unequal rows": "the processes pass different numbers of rows: ",
    "unequal lengths": "the processes pass rows of different lengths",
    "own numbers of tokens": "the processes pass different values of an argument that has no rows",
    "own numbers in Python": "the processes pass different values of an argument that has no rows",
    "a loss of rows": "a loss is computed from the rows of one process",
}


@pytest.mark.parametrize(
    ("size", "mesh"),
    [
        pytest.param(size, mesh, marks=[pytest.mark.long] if size > 2 else [])
        for size, meshes in CASES.items()
        for mesh in meshes
    ],
)
def test_own_rows(tmp_path, size, mesh):
    """Losses, metrics, norms and weights cover the rows of all processes; what cannot is refused in all of them."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * size, str(port), str(size), mesh)
    for told, _ in results:
        found = {name: str(told[name]) for name in REFUSED}
        assert REFUSED == {n: text if found[n].startswith(text) else found[n] for n, text in REFUSED.items()}
        assert {} == {
            name: found
            for name, found in told.items()
            if name not in REFUSED and not (isinstance(found, float) and found < 2e-6)
        }
