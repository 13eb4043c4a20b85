"""Find the models of keras.applications that train on TensorFlow under generated rules as on one device.

    python benchmarks/applications_tensorflow.py                    one of each family: most of an hour
    python benchmarks/applications_tensorflow.py --model MobileNet  one model

Inputs are 32 x 32, or the smallest that a model accepts, with eight rows and random weights. The rules shard the
longest axis of each weight over "model", if the mesh of batch=2, model=4 divides it, and the batch over "batch". The
losses, weights, and slots of two steps of SGD with momentum are compared with Keras on one device. Models run in
float64. In float32, models that normalize over eight values magnify rounding too much for a comparison (MobileNet by
3e6).
"""

from __future__ import annotations

import argparse
import sys
import warnings

from measure import KERAS_ON_TENSORFLOW, TESTS, make_parser, print_outcome, try_families

sys.path += [str(TESTS), str(TESTS / "adapters")]  # for hub_families
TOLERANCE, STEPS, ROWS = 1e-6, 2, 8
SIZES = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}
MODELS = [
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "MobileNetV3Large",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "ConvNeXtTiny",
    "VGG16",
    "VGG19",
    "ResNet50",
    "ResNet50V2",
    "DenseNet121",
    "NASNetMobile",
    "Xception",
    "InceptionV3",
    "InceptionResNetV2",
]


def try_model(name: str) -> None:
    """Train one model in this process, and print its outcome."""
    import layoutmap as lm

    lm.simulate_devices(8, "tensorflow")
    import hub_families
    import keras
    import numpy as np

    from layoutmap.adapters.keras import KerasAdapter

    shape = (SIZES.get(name, 32),) * 2 + (3,)
    keras.config.set_floatx("float64")
    random = np.random.default_rng(0)
    batch = random.normal(size=(ROWS, *shape)), random.integers(0, 8, ROWS)

    def make():
        keras.utils.set_random_seed(0)
        top = {"classes": 8, "classifier_activation": None}
        options = {"include_top": False, "pooling": "avg"} if name.startswith("NASNet") else top
        model = getattr(keras.applications, name)(weights=None, input_shape=shape, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
        return model

    def train_steps(model) -> list:
        losses = []
        for _ in range(STEPS):
            keras.utils.set_random_seed(1)
            losses.append(KerasAdapter().train_step(model, batch)["loss"])
        return [*losses, *hub_families.weights(model)]

    expected = train_steps(make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", lm.LayoutMapWarning)
        try:
            rules = hub_families.rules(lm.plan(make, lm.LayoutMap("batch=2,model=4", rest="replicated")))
            actual = train_steps(rules.build(make, batch_dim="batch", progress=False))
            worst = max(map(hub_families.difference, expected, actual))
        except Exception as error:
            print_outcome(name, "failed", f"{type(error).__name__}: {str(error)[:2000]}")
            return
    notes = sorted({str(each.message).splitlines()[0] for each in caught if "step" in str(each.message)})
    print_outcome(name, "trained" if worst < TOLERANCE else "wrong", f"{worst:.1e}; {'; '.join(notes)}")


def main() -> None:
    """Try models, and print a line for each and the number of each outcome."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument(
        "--seconds", type=float, default=900, help="time limit of a model (default: %(default)s)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        try_model(args.child)
        return
    try_families(args.model or MODELS, (), KERAS_ON_TENSORFLOW, args.seconds)


if __name__ == "__main__":
    main()
