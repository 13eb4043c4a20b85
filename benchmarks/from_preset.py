"""Compare the memory of loading a preset of keras-hub sharded, by four methods.

    python benchmarks/from_preset.py          some minutes, and 384 MiB of disk

A Llama of 384 MiB is loaded on 8 simulated devices, each time in a fresh process: in a scope of this
library, under Keras's own ModelParallel with the same layouts, unsharded ("plain"), and unsharded with
`layout_map.apply` afterwards. "peak" and "in the end" are the growth of the process's resident memory
since before the load.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time

from measure import run_script

METHODS = ("scope", "ModelParallel", "plain", "plain, then apply")
SIZES = {
    "vocabulary_size": 16384,
    "num_layers": 4,
    "num_query_heads": 8,
    "num_key_value_heads": 8,
    "hidden_dim": 1024,
    "intermediate_dim": 4096,
}


def read_resident_mib() -> float:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(method: str, folder: str) -> object:
    """Load the backbone by one of the methods."""
    import keras
    import keras_hub

    import layoutmap as lm
    from layoutmap.adapters.keras.paths import find_variables

    from_preset = keras_hub.models.Backbone.from_preset
    layout_map = lm.LayoutMap.preset("llama", lm.create_mesh("batch=1,model=8"))
    if method == "scope":
        return layout_map.build(lambda: from_preset(folder))
    if method == "plain":
        return from_preset(folder)
    if method == "plain, then apply":
        return layout_map.apply(from_preset(folder))
    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices())
    theirs = keras.distribution.LayoutMap(mesh)
    plan = lm.plan(lambda: from_preset(folder, load_weights=False), layout_map)
    with keras.StatelessScope(initialize_variables=False):
        keys = {
            each.path: each.variable.path for each in find_variables(from_preset(folder, load_weights=False))
        }
    for path, assignment in plan.items():
        if path in keys:
            specs = assignment.layout.sharding_specs
            theirs[keys[path]] = tuple(None if spec == lm.UNSHARDED else spec for spec in specs)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=theirs, batch_dim_name="batch")
    )
    return from_preset(folder)


def measure_method(method: str, folder: str) -> dict[str, float]:
    """Return the peak and final memory of one method in MiB, and its seconds."""
    import jax
    import keras_hub

    tiny = dict.fromkeys(SIZES, 8) | {"num_layers": 1}
    keras_hub.models.Llama3Backbone(**tiny)
    jax.numpy.ones(8).block_until_ready()
    before, began = read_resident_mib(), time.monotonic()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, read_resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(method, folder)
    seconds, end = time.monotonic() - began, read_resident_mib()
    done.set()
    watcher.join()
    del model
    return {"peak": max(peak, end) - before, "end": end - before, "seconds": seconds}


def main() -> None:
    """Measure one method, or all of them in fresh processes."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if len(sys.argv) == 3:
        print(json.dumps(measure_method(*sys.argv[1:])))
        return
    with tempfile.TemporaryDirectory() as folder:
        import keras_hub

        keras_hub.models.Llama3Backbone(**SIZES).save_to_preset(folder)
        for method in METHODS:
            result = run_script([__file__, method, folder])
            print(
                f"{method:<18} peak {result['peak']:6.0f} MiB   in the end {result['end']:6.0f} MiB   "
                f"{result['seconds']:5.1f} s"
            )


if __name__ == "__main__":
    main()
