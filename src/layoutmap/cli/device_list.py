"""List the devices of this process and its number in a job: `layoutmap devices`."""

from __future__ import annotations

import sys
from typing import Any

from layoutmap.cli.output import SUCCESS, print_text
from layoutmap.core.errors import LayoutMapError
from layoutmap.core.mesh import Mesh
from layoutmap.engines import ENGINES, get_engine
from layoutmap.engines.launchers import Launcher, detect_launcher
from layoutmap.scope.devices import list_device_names

_JOIN_HELP = {
    "jax": "call jax.distributed.initialize() first in the program",
    "tensorflow": "set DTENSOR_CLIENT_ID, DTENSOR_NUM_CLIENTS and DTENSOR_JOBS",
    "torch": "set RANK and WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start it with torchrun",
}


def print_devices(options: Any) -> int:
    """Print which launcher started this process and the devices of each engine, and return the exit code."""
    launcher = detect_launcher()
    texts: list[str] = []
    for engine in [options.engine] if options.engine else ENGINES:
        try:
            texts.append(_format_device_list(engine, launcher))
        except Exception as error:  # device drivers raise errors of any type
            missing = isinstance(error, LayoutMapError | ImportError)
            if options.engine:
                raise LayoutMapError(
                    f"{engine} has no devices",
                    why=str(error),
                    fix=f'pip install "layoutmap[{engine}]"'
                    if missing
                    else f"check that {engine} itself lists its devices",
                ) from error
            if not missing:
                print_text(f"layoutmap: {engine} has no devices: {error}", sys.stderr)
    if not texts:
        raise LayoutMapError(
            "no engine lists devices",
            why="no framework is installed",
            fix='pip install "layoutmap[jax]", [tensorflow] or [torch]',
        )
    print_text(
        "\n".join([str(launcher or "process 0 of 1: neither SLURM nor torchrun started it"), *texts]),
        sys.stdout,
    )
    return SUCCESS


def _format_device_list(engine: str, launcher: Launcher | None) -> str:
    names = list_device_names(engine=engine)
    local_ids = get_engine(engine).bind_mesh(Mesh(names, {"all": len(names)})).local_device_ids
    alone = len(local_ids) == len(names)
    count = "1 device" if len(names) == 1 else f"{len(names)} devices"
    lines = [f"{engine}: {count}, {'all' if alone else len(local_ids)} of this process"]
    if alone and launcher is not None and launcher.num_processes > 1:
        lines.append(f"   to see those of all {launcher.num_processes} processes, {_JOIN_HELP[engine]}")
    return "\n".join(
        lines + [f"   {name}{' here' * (i in local_ids and not alone)}" for i, name in enumerate(names)]
    )
