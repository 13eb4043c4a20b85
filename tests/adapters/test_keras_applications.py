"""Models of keras.applications with convolutions in groups: gradients and steps on a mesh are those of one device.

They are deep, and normalize by batches of few values: on one device, too, they change visibly when each weight is moved
by one rounding, and that is what they are allowed. A wrong factor, of two or more, is far from it.
"""

import hub_families
import keras
import numpy as np
import pytest
from rounding import beyond

import layoutmap as lm

PROCESSES = ("jax",)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::layoutmap.core.errors.LayoutMapWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]
OPTIONS = {"weights": None, "classes": 8, "classifier_activation": None}
SMALL = OPTIONS | {"input_shape": (32, 32, 3)}
MODELS = {
    "MobileNet": SMALL | {"alpha": 0.25, "dropout": 0.0},
    "EfficientNetV2B0": SMALL,
    "ConvNeXtTiny": SMALL,
    "Xception": OPTIONS | {"input_shape": (71, 71, 3)},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_one_device(name):
    """With weights sharded wherever the mesh divides them, and SGD with momentum, of which a wrong scale is seen."""

    def make():
        model = getattr(keras.applications, name)(**MODELS[name])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
        return model

    layout_map = hub_families.rules(lm.plan(make, lm.LayoutMap("batch=2,model=4")))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, *MODELS[name]["input_shape"])).astype("float32")

    batch = x, rng.integers(0, 8, 8)
    report = lm.check_parity(make, layout_map, batch, batch_dim="batch", raises=False)
    off = [row for row in report.rows if not row.agrees]

    assert [] == [str(row) for row in off if row.factor is not None]
    assert [] == list(map(str, beyond(off, make, batch)))
