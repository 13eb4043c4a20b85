"""How much memory a preset of keras-hub takes while it is loaded into layouts.

    python benchmarks/from_preset.py          some minutes, and 384 MiB of disk

A Llama of 384 MiB on 8 simulated devices, loaded in four ways, each in a fresh process: in a scope of
this library, under Keras's own ModelParallel with the same layouts, plainly, and plainly with
`layout_map.apply` afterwards. "peak" and "in the end" are what the process takes more than before it
loads, as Linux counts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time

WAYS = ("scope", "ModelParallel", "plain", "plain, then apply")
SIZES = {
    "vocabulary_size": 16384,
    "num_layers": 4,
    "num_query_heads": 8,
    "num_key_value_heads": 8,
    "hidden_dim": 1024,
    "intermediate_dim": 4096,
}


def resident_mib() -> float:
    """What the process takes of memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(way: str, folder: str) -> object:
    """Return the backbone, loaded in one of the ways."""
    import keras
    import keras_hub

    import layoutmap as lm
    from layoutmap.adapters.keras.paths import find_variables

    from_preset = keras_hub.models.Backbone.from_preset
    layout_map = lm.LayoutMap.preset("llama", lm.create_mesh("batch=1,model=8"))
    if way == "scope":
        return layout_map.build(lambda: from_preset(folder))
    if way == "plain":
        return from_preset(folder)
    if way == "plain, then apply":
        return layout_map.apply(from_preset(folder))
    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices())
    theirs = keras.distribution.LayoutMap(mesh)
    plan = lm.plan(lambda: from_preset(folder, load_weights=False), layout_map)
    with keras.StatelessScope(initialize_variables=False):
        keys = {
            found.path: found.variable.path
            for found in find_variables(from_preset(folder, load_weights=False))
        }
    for path, assignment in plan.items():
        if path in keys:
            specs = assignment.layout.sharding_specs
            theirs[keys[path]] = tuple(None if spec == lm.UNSHARDED else spec for spec in specs)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=theirs, batch_dim_name="batch")
    )
    return from_preset(folder)


def measure(way: str, folder: str) -> dict[str, float]:
    """Peak and final memory of one way, in MiB, and seconds."""
    import jax
    import keras_hub

    tiny = dict.fromkeys(SIZES, 8) | {"num_layers": 1}
    keras_hub.models.Llama3Backbone(**tiny)
    jax.numpy.ones(8).block_until_ready()
    before, began = resident_mib(), time.monotonic()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(way, folder)
    seconds, end = time.monotonic() - began, resident_mib()
    done.set()
    watcher.join()
    del model
    return {"peak": max(peak, end) - before, "end": end - before, "seconds": seconds}


def main() -> None:
    """Run one way, or all of them."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    with tempfile.TemporaryDirectory() as folder:
        import keras_hub

        keras_hub.models.Llama3Backbone(**SIZES).save_to_preset(folder)
        for way in WAYS:
            command = [sys.executable, __file__, way, folder]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = json.loads(told.splitlines()[-1])
            print(
                f"{way:<18} peak {found['peak']:6.0f} MiB   in the end {found['end']:6.0f} MiB   "
                f"{found['seconds']:5.1f} s"
            )


if __name__ == "__main__":
    main()
