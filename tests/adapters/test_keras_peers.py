"""What Keras's own `ModelParallel` does where this library does otherwise, as the README says."""

import warnings

import keras

import layoutmap as lm

DEVICES = "batch=2,model=4"


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.up = keras.layers.Dense(16)

    def call(self, x):
        return self.up(x)


def built() -> keras.Model:
    model = Net()
    model(keras.Input((8,)))
    return model


def test_a_model_that_is_built_twice_is_sharded_twice():
    """Keras numbers the names of the second one anew, and replicates it without a word; paths stay."""
    keras.backend.clear_session()
    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
    theirs = keras.distribution.LayoutMap(mesh)
    theirs[".*dense/kernel"] = (None, "model")
    with (
        keras.distribution.ModelParallel(layout_map=theirs, batch_dim_name="batch").scope(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        specs = [tuple(built().up.kernel.value.sharding.spec) for _ in range(2)]
    ours = lm.LayoutMap(lm.create_mesh(DEVICES), {r"up\.kernel": (None, "model")}, rest="replicated")
    layouts = [ours.build(Net, inputs=keras.Input((8,))).up.kernel.layout for _ in range(2)]
    assert [(None, "model"), (None, None)] == [(*spec, None, None)[:2] for spec in specs]
    assert [lm.Layout([None, "model"], ours.mesh)] * 2 == layouts
