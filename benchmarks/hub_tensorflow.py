"""Count the families of keras-hub that train on TensorFlow under generated rules as on one device.

    python benchmarks/hub_tensorflow.py                       all families: some hours
    python benchmarks/hub_tensorflow.py --count 30 --seed 1   thirty random families
    python benchmarks/hub_tensorflow.py --family OPT --family Phi3

The models are those of `tests/adapters/hub_families.py`. The rules shard the longest axis of each weight over "model",
if the mesh of batch=2, model=4 divides it, and the batch over "batch". The losses and weights of two steps of SGD with
momentum are compared with Keras on one device. Each family runs in its own process. Two kinds of families count
separately: those that Keras itself cannot train on TensorFlow, and those that differ more on one device after rounding
the weights.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings

from measure import KERAS_ON_TENSORFLOW, TESTS, make_parser, print_outcome, try_families

TOLERANCE, STEPS = 1e-4, 2
sys.path += [str(TESTS), str(TESTS / "adapters")]  # for hub_families


def try_family(name: str) -> None:
    """Train one family in this process, and print its outcome."""
    import layoutmap as lm

    lm.simulate_devices(8, "tensorflow")
    import hub_families
    import keras

    from layoutmap.adapters.keras import KerasAdapter
    from layoutmap.core.errors import LayoutMapWarning

    def make():
        return hub_families.make(name)

    keras.utils.set_random_seed(0)
    try:
        model = make()
        KerasAdapter().train_step(model, hub_families.batch(model.backbone))
    except Exception as error:
        print_outcome(name, "not on plain Keras", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    keras.utils.set_random_seed(0)
    unsharded = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LayoutMapWarning)
        try:
            rules = hub_families.rules(
                lm.plan(make, lm.LayoutMap("batch=2,model=4", rest="replicated")), name
            )
            keras.utils.set_random_seed(0)
            sharded = rules.build(make, batch_dim="batch", progress=False)
            worst, _ = hub_families.train(unsharded, sharded, STEPS)
        except lm.LayoutMapError as error:
            print_outcome(name, "failed", str(error))
            return
        except Exception as error:
            print_outcome(name, "failed", f"no LayoutMapError: {type(error).__name__}: {str(error)[:2000]}")
            return
    notes = sorted({str(each.message).splitlines()[0] for each in caught if "step" in str(each.message)})
    difference = "not comparable" if name in hub_families.NOT_TRAINED else "wrong"
    print_outcome(name, "trained" if worst < TOLERANCE else difference, f"{worst:.1e}; {'; '.join(notes)}")


def main() -> None:
    """Try families, and print a line for each and the number of each outcome."""
    parser = make_parser(__doc__)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--count", type=int, help="number of random families (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=900, help="time limit of a family (default: %(default)s)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        try_family(args.child)
        return
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import hub_families

    names = args.family or random.Random(args.seed).sample(
        sorted(hub_families.FAMILIES), k=len(hub_families.FAMILIES)
    )
    try_families(names[: args.count], (), KERAS_ON_TENSORFLOW, args.seconds)


if __name__ == "__main__":
    main()
