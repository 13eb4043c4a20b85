"""A process, or one of several, with hooks on gradients; run by test_torch_gradient_hooks.py."""

import json
import os
import sys
import warnings
from pathlib import Path

import gradient_hook_cases
import torch.distributed as dist

import layoutmap as lm


def main():
    number, folder, port, size, first, last = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    if size != "1":  # what torchrun would set; the engine joins the group by itself
        os.environ |= {
            "RANK": str(number),
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
    # First: hooks of programs keep their weights
    found = gradient_hook_cases.left_by_failed_passes(int(size))
    found += gradient_hook_cases.wrong_programs(range(int(first), int(last)), int(size))
    (folder / f"{number}.json").write_text(json.dumps(found))
    if size != "1":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
