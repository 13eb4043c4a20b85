"""One of four processes with weights in uneven shards; run by test_torch_uneven.py.

Arguments: its number, the folder for what it says, the port, the number of processes, and a mesh.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import uneven_models
from cases import some

import layoutmap as lm


def main():
    number, folder, port, size, mesh = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    warnings.filterwarnings(
        "ignore", "The .grad attribute"
    )  # Dynamo asks for that of any tensor, and hides it
    # What torchrun would set; the engine joins the group by itself.
    os.environ |= {"RANK": str(number), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    tries = {"arrays": lambda: uneven_models.find_array_faults(mesh)}
    for name in uneven_models.MODELS:
        tries[name] = lambda name=name: uneven_models.compare_training(name, mesh)
    for name in uneven_models.OPTIMIZERS:
        tries[f"blocks, {name}"] = lambda name=name: uneven_models.compare_training("blocks", mesh, name)
    tries["layoutmap gathers"] = lambda: uneven_models.compare_training("blocks", mesh, gather="own")
    for name, paths in {
        "blocks": ["blocks.0", "blocks.1"],
        "columns": [""],
        "tied by batch": ["blocks.0"],
    }.items():
        tries[f"{name}, compiled"] = lambda name=name, paths=paths: uneven_models.compare_training(
            name, mesh, compiled=paths
        )
    tries["files"] = lambda: uneven_models.find_file_faults(folder / "saved", mesh)
    told = {}
    for name in some(tries, "arrays", "blocks, adamw", "layoutmap gathers", "columns, compiled", "files"):
        try:
            told[name] = tries[name]()
        except Exception:
            told[name] = traceback.format_exc()
    (folder / f"{number}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
