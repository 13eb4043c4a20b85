"""One of several processes that call DTensor's methods in each place; run by test_torch_dtensor_methods.py."""

import json
import os
import sys
from pathlib import Path

import dtensor_methods
import torch
import torch.distributed as dist


def main(number, folder, port, num_processes, first, last):
    """Compare the drawn cases, and write how each differs."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=number, WORLD_SIZE=num_processes)
    dist.init_process_group("gloo")
    meshes = dtensor_methods.MESHES[int(num_processes)]
    cases = [dtensor_methods.draw(seed, meshes) for seed in range(int(first), int(last))]
    # Before the library changes DTensor.
    plain = dtensor_methods.results_of_plain_dtensors(int(num_processes))
    found: dict[int | str, object] = dict(dtensor_methods.differences(cases))
    found["plain"] = dtensor_methods.differences_from_plain_dtensors(plain, int(num_processes))
    (Path(folder) / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
