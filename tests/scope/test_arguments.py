"""What is passed in the wrong place, or is another thing, is refused with what to pass."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest

import layoutmap as lm

pytestmark = pytest.mark.every_case

MAP = lm.LayoutMap("batch=2,model=4", {".*kernel": (None, "model")})


def make_model():
    """A model whose weights wait for its first call."""
    return keras.Sequential([keras.layers.Dense(16, name="d1")])


def refused(call):
    """What the refusal says, as one text."""
    with pytest.raises((lm.ScopeError, lm.MeshError)) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize("function", ["plan", "build", "check_parity"])
def test_a_model_in_the_place_of_the_function_that_makes_it(function):
    """It is named, and the fix is the function or `apply`; nothing has been done with the model."""
    more = (None,) if function == "check_parity" else ()

    assert f"""\
{function}: Sequential is a model, not a function that creates one
  why   {function} creates the model itself, so that every variable is created in its layout
  fix   pass the function: lm.{function}(make_model, layout_map); \
to shard an existing model, call lm.apply(model, layout_map)""" == refused(
        lambda: getattr(lm, function)(make_model(), MAP, *more)
    )


def test_no_function_at_all():
    """What was passed is said by its type."""
    assert """\
plan: make_model is not a function that creates a model
  why   it is None
  fix   pass a function: lm.plan(lambda: keras.Sequential([...]), layout_map)""" == refused(
        lambda: lm.plan(None, MAP)  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("function", "name"), [("plan", "make_model"), ("build", "make_model"), ("apply", "model")]
)
def test_swapped_arguments(function, name):
    """The fix is the call with its arguments in their order."""
    assert f"""\
{function}: the arguments are swapped
  why   the layout map is the second argument
  fix   write lm.{function}({name}, layout_map)""" == refused(lambda: getattr(lm, function)(MAP, make_model))


def test_rules_without_a_map():
    """A dict of rules has no mesh, so a map is to be made of it; so for a scope, too."""
    rules = {".*kernel": (None, "model")}

    assert """\
plan: layout_map is not a LayoutMap
  why   it is of type dict
  fix   pass lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)""" == refused(
        lambda: lm.plan(make_model, rules)  # pyright: ignore[reportArgumentType]
    )
    assert refused(lambda: lm.scope(make_model()).__enter__()).startswith(  # pyright: ignore[reportArgumentType]
        "scope: layout_map is not a LayoutMap\n  why   it is of type keras.Sequential"
    )


def test_a_function_in_the_place_of_a_model():
    """`apply` lays out a model that exists, so the fix is to call the function, or `build`."""
    assert """\
apply: make_model is a function, not a model
  why   apply shards an existing model
  fix   pass the model that the function returns, or call lm.build(make_model, layout_map)""" == refused(
        lambda: lm.apply(make_model, MAP)
    )


def test_the_mesh_of_another_library():
    """JAX's is taken (see tests/core/test_meshes_of_others.py); of others the fix is the mesh of the same dims."""
    meshes = {
        "keras": keras.distribution.DeviceMesh(
            (2, 4), ["rows", "columns"], keras.distribution.list_devices()
        ),
        "torch": SimpleNamespace(mesh_dim_names=("rows", "columns"), shape=(2, 4)),
        "another": object(),
    }
    fixes = {
        name: refused(lambda mesh=mesh: lm.LayoutMap(mesh)).partition("fix")[2].strip()
        for name, mesh in meshes.items()
    }

    said = 'pass lm.create_mesh("{}"), or its dims as text'
    same, example = said.format("rows=2,columns=4"), said.format("batch=2,model=4")
    assert {"keras": same, "torch": same, "another": example} == fixes


@pytest.mark.parametrize(
    ("inputs", "shape", "leaf", "kind"),
    [
        ((8, 16), "(8, 16)", "8", "of type int"),
        ([None, 16], "(None, 16)", "None", "None"),
        ({"ids": "int32"}, "(8, 16)", "'int32'", "of type str"),
    ],
)
def test_inputs_that_are_no_arrays(inputs, shape, leaf, kind):
    """A shape alone says no element type, so the fix is an input of that shape."""
    assert f"""\
inputs={inputs}: {leaf} is not an array
  why   it is {kind}, without a shape or without an element type
  fix   pass an example batch, or its shape and type: inputs=keras.Input(batch_shape={shape}, dtype="float32")\
""" == refused(lambda: lm.plan(make_model, MAP, inputs=inputs))
    fixed = keras.Input(batch_shape=(8, 16), dtype="float32")
    assert "d1.kernel" in lm.plan(make_model, MAP, inputs=fixed)
