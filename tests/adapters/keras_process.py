"""One of two processes of JAX, with four devices each, that train Keras models; run by test_keras_processes.py."""

import json
import random
import sys
import warnings
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import keras
import numpy as np
from cases import EVERYTHING

import layoutmap as lm
from layoutmap.core.errors import LayoutMapError
from layoutmap.scope.devices import list_device_names

L = keras.layers
RULES = {r"up\.kernel": (None, "model"), r"down\.kernel": ("model", "batch"), r"norm\..*": ("model",)}
ROWS, BATCH = 14, 8  # the last batch does not divide


class Counted(L.Dense):
    """Counts how often it is written to a file."""

    written = 0

    def save_own_variables(self, store):
        Counted.written += 1
        super().save_own_variables(store)


def make_model(optimizer="adam"):
    layers = [
        keras.Input((6,)),
        L.Dense(8, name="up", activation="relu", kernel_initializer="orthogonal"),
        L.BatchNormalization(name="norm"),
        L.Dropout(0.5, name="drop"),
        Counted(4, name="down"),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def laid_out(dims, rules=RULES, on=None, **options):
    """The model on a mesh, its batch sharded."""
    mesh = lm.create_mesh(dims) if on is None else lm.Mesh(on, dims)
    with lm.LayoutMap(mesh, rules).scope(**{"batch_dim": "batch"} | options) as scope:
        model = make_model()
    return model, scope


def data():
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(ROWS, 6)).astype("float32"), numbers.integers(0, 4, (ROWS,), "int32")


def batches(arrays, part, parts):
    """Of each batch one part: what one process brings."""
    for start in range(0, ROWS, BATCH):
        rows = slice(start, min(start + BATCH, ROWS))
        size = (rows.stop - rows.start) // parts
        yield tuple(array[rows][part * size : (part + 1) * size] for array in arrays)


class Batches(keras.utils.PyDataset):
    """One process's parts of all batches, in order."""

    def __init__(self, arrays, part=0, parts=1):
        super().__init__()
        self.held = list(batches(arrays, part, parts))

    def __len__(self):
        return len(self.held)

    def __getitem__(self, index):
        return self.held[index]


def fitted(model, part=0, parts=1, **options):
    """What `fit` reports of the first batch."""
    x, y = next(batches(data(), part, parts))
    history = model.fit(x, y, batch_size=BATCH // parts, verbose=0, shuffle=False, **options).history
    return {name: values[0] for name, values in history.items()}


def trained(model, part=0, parts=1):
    """What `fit`, `evaluate`, `predict` and `train_on_batch` give, with a last batch that does not divide."""
    mine = Batches(data(), part, parts)
    history = model.fit(mine, epochs=2, verbose=0, shuffle=False).history
    x = np.concatenate([x for x, _ in mine.held])
    return {
        "fit": history,
        "evaluate": model.evaluate(mine, verbose=0),
        "predict": model.predict(x, batch_size=BATCH // parts, verbose=0).tolist(),
        "step": model.train_on_batch(*mine[0]),
    }


def bits(model):
    return [zlib.crc32(np.ascontiguousarray(value).tobytes()) for value in model.get_weights()]


def seeded(make=make_model, *args, **options):
    keras.utils.set_random_seed(1)
    return make(*args, **options)


class Broken(Exception):
    """What a callback raises."""


class Calls(keras.callbacks.Callback):
    """Calls something after the first batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        self.function()


def broken():
    raise Broken("no more disk")


def refusal(function):
    try:
        function()
    except (LayoutMapError, OSError, Broken) as error:
        return str(error)
    return ""


def without_a_seed():
    """What a model has first: checksums of its values, and its dropout's seed as each device has it."""
    model, _ = laid_out("batch=2,model=4")
    (seed,) = model.get_layer("drop")._seed_generators
    held = [np.asarray(shard.data).tolist() for shard in seed.state.value.addressable_shards]
    return {"bits": bits(model), "seeds": held}


def saved(model, folder, number):
    """What comes back from files that both processes were to write, and how often this one wrote."""
    before = Counted.written
    model.save(folder / "m.keras")
    model.save_weights(folder / f"own{number}.weights.h5")
    own = Counted.written - before
    checkpoint = keras.callbacks.ModelCheckpoint(str(folder / "last.weights.h5"), save_weights_only=True)
    fitted(model, number, 2, callbacks=[checkpoint])
    values = model.get_weights()
    plain = make_model()
    again, _ = laid_out("batch=4,model=2")
    for each in (plain, again):
        each.optimizer.build(each.trainable_variables)
        each.load_weights(folder / "last.weights.h5")
    with lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES).scope(batch_dim="batch"):
        whole = keras.models.load_model(folder / "m.keras", custom_objects={"Counted": Counted})
    return {
        "written": own,
        "checkpoint": Counted.written - before - own,
        "own": (folder / f"own{number}.weights.h5").exists(),
        "plain": all(map(np.array_equal, values, plain.get_weights())),
        "again": all(map(np.array_equal, values, again.get_weights())),
        "layouts": [str(v.layout) for v in model.variables] == [str(v.layout) for v in again.variables],
        "whole": [str(v.layout) for v in whole.get_layer("down").weights],
        "refused": refusal(lambda: model.save_weights(folder / "none" / "m.weights.h5")),
    }


def of_both(names, number):
    """Evaluation and this process's predictions, where its parts of the batch are not side by side."""
    model, _ = seeded(laid_out, "batch=4,model=1", on=[names[0], names[4], names[1], names[5]])
    x, y = next(batches(data(), number, 2))
    told = {"evaluate": model.evaluate(x, y, batch_size=BATCH // 2, verbose=0)}
    return told | {"predict": model.predict(x, batch_size=BATCH // 2, verbose=0).tolist()}


def refused(cut, shared, names, number):
    """What is said where processes do not do the same."""
    random.seed(number)
    x, y = data()
    few = 4 - number
    rules = RULES | ({r"up\.bias": ("model",)} if number else {})
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES)
    return {
        "plan": refusal(lambda: laid_out("batch=2,model=4", rules)),
        "sizes": refusal(lambda: cut.train_on_batch(x[:few], y[:few])),
        "verbs": refusal(lambda: (cut.train_on_batch if number else cut.test_on_batch)(x[:4], y[:4])),
        "contents": refusal(lambda: shared.train_on_batch(x[number : number + 8], y[:8])),
        "divided": refusal(
            lambda: laid_out("batch=3,model=2", {}, [*names[:3], *names[4:7]])[0].test_on_batch(x[:2], y[:2])
        ),
        "fails": refusal(
            lambda: fitted(cut, number, 2, epochs=2, callbacks=[Calls(broken)] if number else [])
        ),
        "values": refusal(lambda: layout_map.apply(make_model())),
    }


def main():
    number, folder, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")
    jax.distributed.initialize(address, 2, number)
    names = list_device_names("jax")
    told = {"unseeded": without_a_seed()}
    cut, scope = seeded(laid_out, "batch=4,model=2")
    told |= {
        "plain bits": bits(seeded()),
        "bits": bits(cut),
        "plan": scope.plan.fingerprint,
        "cut": trained(cut, number, 2),
    }
    shared, _ = seeded(laid_out, "model=2,batch=4")
    told["shared"] = fitted(shared)
    if EVERYTHING:
        told["both"] = of_both(names, number)
    told["saved"] = saved(cut, folder, number)
    told["refused"] = refused(cut, shared, names, number)
    if number:
        told["alone"] = refusal(lambda: laid_out("batch=2,model=2", on=names[:4]))
    else:
        told["alone"] = fitted(seeded(laid_out, "batch=2,model=2", on=names[:4])[0])
    (folder / f"{number}.json").write_text(json.dumps(told))
    jax.distributed.shutdown()


if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # Keras imports it to seed it, which takes longer than all the rest
    main()
