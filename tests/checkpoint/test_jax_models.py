"""Models of JAX and the states of their optimizers come back as they were: values, layouts, structure."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapters.jax_models import MODELS, RULES, Equinox, Feedforward, Language, make_dict
from adapters.optax_optimizers import MESH, OPTIMIZERS, bits, laid_out, plain_params
from cases import few
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax.checkpoints import list_stored_arrays, restore_arrays
from layoutmap.core.errors import CheckpointError
from layoutmap.engines import get_engine

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


def places(tree: Any) -> list[Any]:
    """Where each array of a pytree is."""
    return [
        (leaf.sharding, leaf.committed) if isinstance(leaf, jax.Array) else type(leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def all_bits(tree: Any) -> list[Any]:
    return [bits(leaf) for leaf in jax.tree.leaves(tree)]


def changed(tree: Any) -> Any:
    """A pytree with other values of the same types in the same places."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, (np.ndarray, np.generic)):
            return np.asarray(leaf + 1, leaf.dtype)[()]
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jax.random.key_data(leaf) + 1, impl=jax.random.key_impl(leaf))
        return ~leaf if leaf.dtype == bool else leaf + 1

    return jax.tree.map(other, tree)


# -- models


def test_no_initializer_computes_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is built while it is loaded, no variable of the checkpoint is passed to an initializer."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES["language"])
    lm.save(Language(nnx.Rngs(0)), tmp_path)
    created: list[str] = []
    engine = type(get_engine("jax"))
    create = engine.create_initial_values

    def noting(self: Any, assignments: Any, initializers: Any, progress: Any = None) -> Any:
        created.extend(assignment.variable.path for assignment in assignments.values())
        return create(self, assignments, initializers, progress)

    monkeypatch.setattr(engine, "create_initial_values", noting)
    lm.load(lambda: Language(nnx.Rngs(1)), tmp_path, layout_map=layout_map, library="jax")
    assert [] == created


@pytest.mark.parametrize("mesh", ["batch=2,model=4", None])
def test_a_module_is_loaded_in_place(tmp_path: Path, mesh: str | None) -> None:
    """A module stays the same object with the same Variables, each array where it was; shared ones stay shared."""
    model = Language(nnx.Rngs(0))
    if mesh:
        lm.LayoutMap(lm.create_mesh(mesh), RULES["language"]).apply(model)
    lm.save(model, tmp_path)
    state = nnx.state(model)
    held = dict(nnx.to_flat_state(state))
    expected, structure = all_bits(state), jax.tree.structure(state)
    kept = [changed(state) if mesh else nnx.state(Language(nnx.Rngs(1)))]
    nnx.update(model, kept.pop())
    where = places(nnx.state(model))
    assert expected != all_bits(nnx.state(model))

    assert model is lm.load(model, tmp_path)
    after = nnx.state(model)
    assert (expected, where) == (all_bits(after), places(after))
    assert structure == jax.tree.structure(after)
    assert model.head is model.table
    for path, variable in nnx.to_flat_state(after):
        assert not isinstance(variable, nnx.Variable) or variable is held[path]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Static:
    """A dataclass with a part that is not an array."""

    weight: jax.Array
    name: str = dataclasses.field(metadata={"static": True})


def everything() -> dict[str, Any]:
    mesh = lm.create_mesh("batch=2,model=4")
    key = jax.random.key(3)
    put = lm.dtensor.relayout
    return {
        "key": key,
        "keys": put(jax.random.split(key, 8), lm.Layout(["model"], mesh)),
        "rbg": jax.random.key(1, impl="rbg"),
        "old key": jax.random.PRNGKey(7),
        "model": {"dict": make_dict(), "equinox": Equinox(key)},
        "static": Static(
            put(jnp.ones((8, 8), jnp.bfloat16), lm.Layout([("batch", "model"), None], mesh)), "s"
        ),
        "numpy": np.arange(3.0),
        "number": np.float32(2),
        "int64": np.arange(2),
        "third": jax.device_put(jnp.ones(3), jax.devices()[3]),
        "weak": jnp.asarray(1.5),
        "weak vector": jnp.full((3,), 1.5),
        "empty": jnp.zeros((0, 3)),
        "step": jnp.int32(4),
        "text": "not an array",
        "nothing": None,
        "function": jnp.tanh,
        "float": 2.5,
    }


def test_a_pytree_comes_back_with_all_that_is_in_it(tmp_path: Path) -> None:
    """Arrays of any kind come back bit for bit where they were; structure and what is not an array stay as they are."""
    tree = everything()
    lm.save(tree, tmp_path)
    arrays, rest = eqx.partition(tree, eqx.is_array_like)
    arrays, numbers = eqx.partition(arrays, lambda leaf: hasattr(leaf, "dtype"))
    loaded = lm.load(eqx.combine(changed(arrays), numbers, rest), tmp_path)

    assert jax.tree.structure(tree) == jax.tree.structure(loaded)
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(loaded), strict=True
    ):
        if hasattr(old, "dtype"):
            assert (path, type(old), bits(old)) == (path, type(new), bits(new))
            assert (path, places(old)) == (path, places(new))
        else:
            assert old is new
    layout_of = get_engine("jax").get_layout
    assert layout_of(tree["keys"]) == layout_of(loaded["keys"])
    assert jax.random.uniform(tree["rbg"]) == jax.random.uniform(loaded["rbg"])


def test_donated_arrays_are_loaded_again(tmp_path: Path) -> None:
    """A model whose arrays a step has consumed takes those of a checkpoint, in the layouts that it had."""
    mesh = lm.create_mesh("batch=2,model=4")
    put = lm.dtensor.relayout
    tree = {
        "kernel": put(jnp.arange(32.0).reshape(4, 8), lm.Layout([None, "model"], mesh)),
        "key": put(jax.random.split(jax.random.key(0), 4), lm.Layout(["model"], mesh)),
        "plain": jnp.ones(3),
    }
    expected, where = all_bits(tree), places(tree)
    lm.save(tree, tmp_path)
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
    loaded = lm.load(tree, tmp_path)
    assert (expected, where) == (all_bits(loaded), places(loaded))


def test_a_train_state_that_is_a_pytree(tmp_path: Path) -> None:
    """Model, optimizer and count in one pytree, as flax and many programs keep them, are one model."""
    tx = optax.adamw(1e-2)
    layout_map = lm.LayoutMap(lm.create_mesh(MESH))
    params = laid_out(plain_params(), layout_map.mesh)
    state = {
        "params": params,
        "opt_state": layout_map.build_optimizer(tx, params),
        "step": jnp.int32(3),
        "tx": tx,
    }
    lm.save(state, tmp_path)
    arrays, rest = eqx.partition(state, eqx.is_array)
    loaded = lm.load(eqx.combine(changed(arrays), rest), tmp_path)
    assert jax.tree.structure(state) == jax.tree.structure(loaded)
    assert tx == loaded["tx"]
    kept = eqx.filter(state, eqx.is_array), eqx.filter(loaded, eqx.is_array)
    assert all_bits(kept[0]) == all_bits(kept[1])
    assert places(kept[0]) == places(kept[1])


# -- optimizers


@pytest.mark.parametrize("name", few(OPTIMIZERS, "adafactor", "noisy"))
def test_the_state_of_an_optimizer_comes_back(tmp_path: Path, name: str) -> None:
    """Whatever its state is made of, each leaf of it comes back bit for bit, in the layout that it had."""
    tx = OPTIMIZERS[name]()
    layout_map = lm.LayoutMap(lm.create_mesh(MESH))
    params = laid_out(plain_params(), layout_map.mesh)
    state = changed(layout_map.build_optimizer(tx, params))
    lm.save(params, tmp_path, optimizer=state)
    fresh = layout_map.build_optimizer(tx, params)
    model, loaded = lm.load(params, tmp_path, optimizer=fresh)

    assert all_bits(params) == all_bits(model)
    assert jax.tree.structure(fresh) == jax.tree.structure(loaded)
    assert all_bits(state) == all_bits(loaded)
    assert places(fresh) == places(loaded)
    layout_of = get_engine("jax").get_layout
    assert [*map(layout_of, jax.tree.leaves(fresh))] == [*map(layout_of, jax.tree.leaves(loaded))]


@pytest.mark.parametrize("name", few(OPTIMIZERS, "multi_transform"))
def test_each_slot_is_described_as_what_it_is(name: str) -> None:
    """The slots that are described and the leaves of the state are in one order, of the same shapes and types."""
    params = plain_params()
    state = OPTIMIZERS[name]().init(params)
    leaves = jax.tree.leaves(state)
    slots = [
        each for each in list_stored_arrays(params, state) if each.variable.path.startswith("optimizer.")
    ]
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    data = [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, keys, strict=True)]
    assert [(leaf.shape, leaf.dtype.name) for leaf in data] == [
        (each.variable.shape, each.variable.dtype) for each in slots
    ]
    numbered = {
        each.variable.path: np.full(each.variable.shape, n, each.variable.dtype)
        for n, each in enumerate(slots)
    }
    _, new = restore_arrays(params, state, numbered.items())
    found = [
        np.asarray(jax.random.key_data(n) if k else n)
        for n, k in zip(jax.tree.leaves(new), keys, strict=True)
    ]
    assert [*map(np.ndarray.tobytes, numbered.values())] == [*map(np.ndarray.tobytes, found)]


@pytest.mark.parametrize("mesh", ["batch=2,model=4", None])
def test_an_nnx_optimizer_is_loaded_in_place(tmp_path: Path, mesh: str | None) -> None:
    """A module and its `nnx.Optimizer` are loaded in place: the same objects, values and count, each where it was."""

    def made(seed: int) -> tuple[Any, Any]:
        model = Feedforward(nnx.Rngs(seed))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        if mesh is None:
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)
        layout_map = lm.LayoutMap(lm.create_mesh(mesh), RULES["feedforward"])
        layout_map.apply(model)
        return model, layout_map.build_optimizer(tx, model)

    model, optimizer = made(0)
    nnx.update(model, changed(nnx.state(model)))
    nnx.update(optimizer, changed(nnx.state(optimizer)))
    lm.save(model, tmp_path, optimizer=optimizer)
    other, fresh = made(1)
    where = places(nnx.state(other)), places(nnx.state(fresh))
    assert (other, fresh) == lm.load(other, tmp_path, optimizer=fresh)
    assert all_bits(nnx.state(model)) == all_bits(nnx.state(other))
    assert all_bits(nnx.state(optimizer)) == all_bits(nnx.state(fresh))
    assert where == (places(nnx.state(other)), places(nnx.state(fresh)))


def test_an_optimizer_is_made_in_the_same_call(tmp_path: Path) -> None:
    """A function that makes the optimizer is called with the model that was loaded, and its state is loaded too."""
    first = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES["feedforward"])
    second = lm.LayoutMap(lm.create_mesh("model=8"), {r".*\.up\.kernel": (None, "model")})
    make: Callable[[], Any] = lambda: MODELS["feedforward"]().model  # noqa: E731
    model = first.build(make, library="jax")
    optimizer = first.build_optimizer(optax.adam(1e-3), model)
    optimizer.step.set_raw_value(optimizer.step.get_raw_value() + 5)
    nnx.update(optimizer.opt_state[0].mu, changed(optimizer.opt_state[0].mu))
    lm.save(model, tmp_path, optimizer=optimizer)
    other, fresh = lm.load(
        make,
        tmp_path,
        layout_map=second,
        library="jax",
        optimizer=lambda model: second.build_optimizer(optax.adam(1e-3), model),
    )
    assert all_bits(nnx.state(model)) == all_bits(nnx.state(other))
    assert all_bits(nnx.state(optimizer)) == all_bits(nnx.state(fresh))
    kernel = lm.dtensor.fetch_layout(
        fresh.opt_state[0].mu["blocks"]["layers"][0]["up"]["kernel"].get_raw_value()
    )
    assert ("unsharded", "model") == kernel.sharding_specs


@pytest.mark.parametrize("axes", [None, "out in -> in out"])
@pytest.mark.parametrize("name", ["adafactor", "adam"])
def test_a_name_table_of_weights_is_for_their_slots_too(tmp_path: Path, name: str, axes: str | None) -> None:
    """Slots of a renamed weight are read from the old names, with the axes of the weight."""
    tx = {"adam": optax.adam(1e-2), "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2)}[name]
    values = iter(np.random.default_rng(0).normal(size=(9, 8, 4)).astype(np.float32))
    kernels = [{"fc1": next(values), "fc2": next(values)} for _ in range(3)]
    renamed = [{"up": each["fc1"] if axes is None else each["fc1"].T, "fc2": each["fc2"]} for each in kernels]

    def step(params: Any) -> tuple[Any, Any]:
        """Return the model and the state of its optimizer after a step, computed for the layout of `params`."""
        state = tx.init(params)
        updates, state = tx.update(jax.tree.map(lambda x: 2 * x, params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = step({"h": kernels})
    lm.save(params, tmp_path, optimizer=state)
    names = {"h.*.up": "h.*.fc1" if axes is None else {"from": "h.*.fc1", "axes": axes}}
    fresh = jax.tree.map(jnp.zeros_like, {"h": renamed})
    load = functools.partial(lm.load, fresh, tmp_path, names=names, optimizer=tx.init(fresh))
    if name == "adafactor" and axes:  # its rows and columns do not have the axes that the table swaps
        with pytest.raises(CheckpointError, match=r"optimizer\.h\.2\.up\.\S+ +not in the checkpoint"):
            load()
        return
    assert all_bits(step({"h": renamed})) == all_bits(load())


@pytest.mark.parametrize("kind", ["module", "pytree"])
def test_an_existing_optimizer_without_a_mesh_is_sharded_like_the_weights(tmp_path: Path, kind: str) -> None:
    """It was made outside of the scope. One that has layouts keeps them."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES["feedforward"])
    tx = optax.adamw(1e-2)
    make: Callable[[], Any] = lambda: MODELS["feedforward"]().model  # noqa: E731
    if kind == "pytree":
        make = lambda: nnx.to_pure_dict(nnx.state(MODELS["feedforward"]().model))  # noqa: E731
    new = (lambda m: nnx.Optimizer(m, tx, wrt=nnx.Param)) if kind == "module" else tx.init
    model = layout_map.build(make, library="jax")
    optimizer = layout_map.build_optimizer(tx, model)
    lm.save(model, tmp_path, optimizer=optimizer)
    _, fresh = lm.load(make, tmp_path, layout_map=layout_map, library="jax", optimizer=new(make()))

    assert places(nnx.state(optimizer)) == places(nnx.state(fresh))
    assert all_bits(nnx.state(optimizer)) == all_bits(nnx.state(fresh))
    zero = layout_map.build_optimizer(tx, model, zero_dim="batch")
    where = places(nnx.state(zero))
    _, fresh = lm.load(make, tmp_path, layout_map=layout_map, library="jax", optimizer=zero)
    assert where == places(nnx.state(fresh)) != places(nnx.state(optimizer))


@pytest.mark.filterwarnings("default::layoutmap.LayoutMapWarning")
def test_slots_that_are_not_read_are_named(tmp_path: Path) -> None:
    """As for a Keras model. `extra="ignore"` says nothing, and neither does a load of all."""
    params = plain_params()
    state = optax.adam(1e-2).init(params)
    lm.save(params, tmp_path, optimizer=state)
    with pytest.warns(lm.LayoutMapWarning, match="15 optimizer variables were not read") as caught:
        lm.load(params, tmp_path)
    (warning,) = caught
    assert "pass optimizer=" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.load(params, tmp_path, extra="ignore")
        lm.load(params, tmp_path, optimizer=state)


# -- what is refused


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """A state with other slots than were saved, a transformation without one, or none at all, is refused by name."""
    params = plain_params()
    lm.save(params, tmp_path, optimizer=optax.adam(1e-2).init(params))
    lm.save(params, tmp_path, step=1)
    said = refusals(
        lambda: lm.load(params, tmp_path, step=0, optimizer=optax.sgd(1e-2).init(params)),
        lambda: lm.load(params, tmp_path, step=0, optimizer=optax.sgd(1e-2, momentum=0.9).init(params)),
        lambda: lm.load(params, tmp_path, step=0, optimizer=optax.adam(1e-2)),
        lambda: lm.load(params, tmp_path, step=1, optimizer=optax.adam(1e-2).init(params)),
    )
    assert [
        f"{tmp_path}/step-0: the checkpoint does not match this model",
        f"{tmp_path}/step-0: the checkpoint does not match this model",
        "optimizer: an object of type optax.GradientTransformationExtraArgs contains no state",
        f"{tmp_path}/step-1: no optimizer state for jax was saved",
    ] == said


def refusals(*functions: Callable[[], object]) -> list[str]:
    said: list[str] = []
    for function in functions:
        with pytest.raises(CheckpointError) as raised:
            function()
        said.append(str(raised.value).partition("\n")[0])
    return said


def test_missing_and_extra_and_other_types(tmp_path: Path) -> None:
    """What a checkpoint lacks is kept, what it has too many of is left out, and types are converted, if asked for."""
    lm.save({"a": jnp.ones(3), "b": jnp.ones(2)}, tmp_path)
    other = {"a": jnp.zeros(3, jnp.bfloat16), "c": jnp.zeros(4)}
    assert [f"{tmp_path}/step-0: the checkpoint does not match this model"] == refusals(
        lambda: lm.load(other, tmp_path)
    )
    with pytest.warns(
        lm.LayoutMapWarning, match=r"1 weight of the model not restored\n  not in the checkpoint  c\n"
    ):
        loaded = lm.load(other, tmp_path, missing="keep", extra="ignore", cast=True)
    assert all_bits({"a": jnp.ones(3, jnp.bfloat16), "c": jnp.zeros(4)}) == all_bits(loaded)
