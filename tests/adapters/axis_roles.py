"""What slices of a layer's weights do to its output, beside the roles that an adapter says their axes have."""

import numpy as np


def random(shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def only(array, axis, i):
    """An array of which one slice is kept, and all else is zero."""
    kept = np.zeros_like(array)
    index = (slice(None),) * axis + (i,)
    kept[index] = array[index]
    return kept


def assert_right(roles, values, output):
    """Slices along an axis that is put out fill slices of the output; those along one that is summed over add up."""
    zero = {name: np.zeros_like(value) for name, value in values.items()}
    without_bias = {"bias": zero["bias"]} if "bias" in values else {}

    def computed(**given):
        return np.asarray(output(**values | without_bias | given))

    whole, axes_of_output = computed(), {}
    for name in values.keys() - {"bias"}:
        for axis, role in enumerate(roles[name]):
            slices = [
                computed(**{name: only(values[name], axis, i)}) for i in range(values[name].shape[axis])
            ]
            np.testing.assert_allclose(whole, sum(slices), rtol=1e-5, atol=1e-5)
            filled = [np.nonzero(each) for each in slices]
            apart = [d for d in range(1, whole.ndim) if all(set(f[d]) == {i} for i, f in enumerate(filled))]
            assert bool(apart) == role.startswith("out"), (name, axis, role)
            if apart:
                (axes_of_output[role],) = apart
    for axis, role in enumerate(roles.get("bias", ())):
        for i in range(values["bias"].shape[axis] if role else 0):
            filled = np.nonzero(computed(**zero | {"bias": only(values["bias"], axis, i)}))
            assert {i} == set(filled[axes_of_output[role]])
