"""One of four processes in which torch's fully_shard gathers weights; run by test_torch_fully_shard.py."""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import fully_shard_gradients
import fully_shard_options
import fully_shard_traffic
import torch.distributed as dist

import layoutmap as lm


def main():
    number, folder, port, size, *names = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    # What torchrun would set; the engine joins the group by itself.
    os.environ |= {"RANK": str(number), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    scenarios = vars(fully_shard_gradients) | vars(fully_shard_options) | vars(fully_shard_traffic)
    told = {}
    for name in names:
        try:
            told[name] = scenarios[name]()
        except Exception:
            told[name] = traceback.format_exc()
    (folder / f"{number}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
