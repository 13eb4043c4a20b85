"""Which models of keras.applications train on TensorFlow, under rules made mechanically, as on one device.

    python benchmarks/applications_tensorflow.py                    one of each family: most of an hour
    python benchmarks/applications_tensorflow.py --model MobileNet  or those that are named

Inputs of 32 x 32, or the smallest that a model takes, random weights, eight rows. Each weight that a mesh of batch=2,
model=4 divides has its longest axis over "model", and the batch is sharded over "batch". Two steps of SGD with
momentum: losses, weights and slots are compared with plain Keras on one device. That is in float64: in float32 models
that normalize by eight values magnify a rounding so much (MobileNet by 3e6) that any other number would be within it.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from families import tell, try_each

sys.path += [str(Path(__file__).resolve().parents[1] / "tests" / each) for each in ("", "adapters")]
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


def child(name: str) -> None:
    """One model, in this process; prints what came of it as JSON."""
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

    def steps(model) -> list:
        losses = []
        for _ in range(STEPS):
            keras.utils.set_random_seed(1)
            losses.append(KerasAdapter().train_step(model, batch)["loss"])
        return [*losses, *hub_families.weights(model)]

    def largest(one, other) -> float:
        return max(map(hub_families.difference, one, other))

    expected = steps(make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", lm.LayoutMapWarning)
        try:
            rules = hub_families.rules(lm.plan(make, lm.LayoutMap("batch=2,model=4", rest="replicated")))
            worst = largest(expected, steps(rules.build(make, batch_dim="batch", progress=False)))
        except Exception as error:
            tell(name, "failed", f"{type(error).__name__}: {str(error)[:2000]}")
            return
    told = sorted({str(each.message).splitlines()[0] for each in caught if "step" in str(each.message)})
    tell(name, "trained" if worst < TOLERANCE else "wrong", f"{worst:.1e}; {'; '.join(told)}")


def main() -> None:
    """Try models and print a line for each, and how many trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=900, help="how long a model may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
        return
    environment = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ["KERAS_BACKEND"] = "tensorflow"
    try_each(asked.model or MODELS, (), environment, asked.seconds)


if __name__ == "__main__":
    main()
