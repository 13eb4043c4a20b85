"""How many families of keras-hub train on TensorFlow, under rules made mechanically, as on one device.

    python benchmarks/hub_tensorflow.py                       all families: some hours
    python benchmarks/hub_tensorflow.py --count 30 --seed 1   thirty of them, drawn
    python benchmarks/hub_tensorflow.py --family OPT --family Phi3

The configurations of `tests/adapters/hub_families.py`: each weight that a mesh of batch=2, model=4 divides has its
longest axis over "model", and the batch is sharded over "batch". Two steps of SGD with momentum: losses and weights are
compared with plain Keras on one device. Each family has a process of its own. What plain Keras does not train on
TensorFlow is counted apart, and so is what on one device differs by more where weights are rounded.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from pathlib import Path

from families import tell, try_each

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE, STEPS = 1e-4, 2
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "adapters")]  # the models of the tests


def child(name: str) -> None:
    """One family, in this process; prints what came of it as JSON."""
    import layoutmap as lm

    lm.simulate_devices(8, "tensorflow")
    import hub_families
    import keras

    from layoutmap.core.errors import LayoutMapWarning

    def make():
        return hub_families.make(name)

    keras.utils.set_random_seed(0)
    try:
        plain = make()
        adapter_step(plain, hub_families.batch(plain.backbone))
    except Exception as error:
        tell(name, "not on plain Keras", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    keras.utils.set_random_seed(0)
    plain = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LayoutMapWarning)
        try:
            rules = hub_families.rules(
                lm.plan(make, lm.LayoutMap("batch=2,model=4", rest="replicated")), name
            )
            keras.utils.set_random_seed(0)
            sharded = rules.build(make, batch_dim="batch", progress=False)
            worst, _ = hub_families.train(plain, sharded, STEPS)
        except lm.LayoutMapError as error:
            tell(name, "failed", str(error))
            return
        except Exception as error:
            tell(name, "failed", f"not in our words: {type(error).__name__}: {str(error)[:2000]}")
            return
    told = sorted({str(each.message).splitlines()[0] for each in caught if "step" in str(each.message)})
    differs = "not comparable" if name in hub_families.NOT_TRAINED else "wrong"
    tell(name, "trained" if worst < TOLERANCE else differs, f"{worst:.1e}; {'; '.join(told)}")


def adapter_step(model, data) -> None:
    """One step of a plain model."""
    from layoutmap.adapters.keras import KerasAdapter

    KerasAdapter().train_step(model, data)


def main() -> None:
    """Try families and print a line for each, and how many trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--count", type=int, help="how many, drawn (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900, help="how long a family may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
        return
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import hub_families

    names = asked.family or random.Random(asked.seed).sample(
        sorted(hub_families.FAMILIES), k=len(hub_families.FAMILIES)
    )
    environment = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try_each(names[: asked.count], (), environment, asked.seconds)


if __name__ == "__main__":
    main()
