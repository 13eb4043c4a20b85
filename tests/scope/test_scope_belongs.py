"""A scope belongs to the code between its `with` and its end, in the thread and the task that opened it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import threading
import warnings

import numpy as np
import pytest

import layoutmap as lm
from layoutmap.adapters.current import get_current_session
from layoutmap.engines import get_engine

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = pytest.mark.every_case
RUNNING = os.environ.get("LAYOUTMAP_TEST_PROCESS", "")
LIBRARIES = ("keras", "torch") if RUNNING == "torch" else ("keras",)
MESH = lm.Mesh(None, "x=2,y=4")
X, Y = ("x", None), ("y", None)


@pytest.fixture(params=LIBRARIES)
def library(request):
    """The model library; torch is not known to Keras's processes."""
    return request.param


def scope(library, specs):
    """A scope that shards the kernel over one dim and replicates the bias."""
    rules = {r".*(kernel|weight)$": specs, r".*bias$": (None,)}
    return lm.LayoutMap(MESH, rules).scope(library=library)


def make(library):
    """A layer with a kernel of 64 x 64."""
    if library == "torch":
        import torch

        return torch.nn.Linear(64, 64)
    import keras

    layer = keras.layers.Dense(64)
    layer.build((None, 64))
    return layer


def specs_of(layer):
    """The sharding specs of the layer's kernel, which has values; `None`: it is a plain array."""
    kernel = layer.kernel.value if hasattr(layer, "kernel") else layer.weight
    engine = get_engine("torch" if hasattr(layer, "weight") else _engine_name())
    layout = engine.get_layout(kernel)

    assert np.isfinite(engine.to_numpy(kernel)).all()
    return layout and layout.sharding_specs


def _engine_name():
    return RUNNING if RUNNING in PROCESSES else "jax"


ELSEWHERE = "is built in a task or thread that was started in a scope, so it stays unsharded"


def test_tasks_and_threads_inherit_no_scope(library):
    """What tasks and threads that are made inside of a scope build is plain, while it is open and after it."""
    made = {}

    async def build(name, when):
        await when.wait()
        made[name] = make(library)

    async def main():
        first, second = asyncio.Event(), asyncio.Event()
        first.set()
        with scope(library, X):
            later = asyncio.create_task(build("task, after the scope", second))
            await asyncio.create_task(build("task", first))
            made["thread"] = await asyncio.to_thread(make, library)
            made["copied context"] = await asyncio.to_thread(contextvars.copy_context().run, make, library)
            made["own"] = make(library)
        second.set()
        await later
        made["after"] = make(library)

    with pytest.warns(lm.LayoutMapWarning, match=ELSEWHERE) as told:
        asyncio.run(main())

    assert [__file__] == [w.filename for w in told]  # one warning for each scope
    own = {"own": lm.Layout(X, MESH).sharding_specs}
    assert {name: own.get(name) for name in made} == {name: specs_of(each) for name, each in made.items()}
    assert 6 == len(made)
    assert get_current_session() is None


def gathered(library):
    async def build():
        return make(library)

    async def main():
        with scope(library, X):
            kept = make(library)
            return kept, *await asyncio.gather(build(), build())

    return asyncio.run(main())


def in_a_thread(library):
    async def main():
        with scope(library, X):
            return make(library), await asyncio.to_thread(make, library)

    return asyncio.run(main())


def a_loop_inside(library):
    async def main():
        return make(library)

    with scope(library, X):
        return make(library), asyncio.run(main())


@pytest.mark.parametrize("start", [gathered, in_a_thread, a_loop_inside])
def test_a_model_of_a_task_is_told_where_it_is_built(library, start):
    """One warning for each scope says that the task's models are plain, where the task builds them, and the fix."""
    with pytest.warns(lm.LayoutMapWarning, match=rf"(?s){ELSEWHERE}.*fix .*layout_map\.build") as told:
        own, *others = start(library)

    assert [__file__] == [w.filename for w in told]
    assert lm.Layout(X, MESH).sharding_specs == specs_of(own)
    assert {None} == {specs_of(each) for each in others}


def test_a_scope_of_which_other_threads_build_the_models(library):
    """Threads of an executor know no scope: one in whose block nothing is built says so at its end."""
    with warnings.catch_warnings(record=True) as told, concurrent.futures.ThreadPoolExecutor() as pool:
        warnings.simplefilter("always")
        with scope(library, X):
            made = pool.submit(make, library).result()

    assert "saw no layer and no variable" in str(told[-1].message)
    assert __file__ == told[-1].filename
    assert specs_of(made) is None


def test_both_fixes_of_a_model_that_a_task_builds(library):
    """Building in the block, and `layout_map.build` in the task, lay the model out and warn of nothing."""
    layout_map = lm.LayoutMap(MESH, {r".*(kernel|weight)$": Y, r".*bias$": (None,)})

    def build():
        return layout_map.build(lambda: make(library), library=library)

    async def task():
        return build()

    async def main():
        with scope(library, X):
            own = make(library)
            others = await asyncio.create_task(task()), await asyncio.to_thread(build)
        return own, *others

    own, *others = asyncio.run(main())
    x, y = (lm.Layout(specs, MESH).sharding_specs for specs in (X, Y))
    assert [x, y, y] == [specs_of(each) for each in (own, *others)]


@pytest.mark.parametrize("first_to_end", ["a", "b"])
def test_scopes_of_two_tasks_that_take_turns(library, first_to_end):
    """Each task's models are in the layouts of that task's map, whichever scope ends first."""
    made = {}

    async def build(name, specs, steps, ends):
        with scope(library, specs):
            await steps.wait()
            made[name, 1] = make(library)
            await steps.wait()
            made[name, 2] = make(library)
            await ends.wait()
        made[name, 3] = make(library)

    async def main():
        steps = asyncio.Barrier(2)
        ends = {"a": asyncio.Event(), "b": asyncio.Event()}
        tasks = {n: asyncio.create_task(build(n, s, steps, ends[n])) for n, s in (("a", X), ("b", Y))}
        for name in sorted(ends, key=lambda name: name != first_to_end):
            ends[name].set()
            await tasks[name]
        made["after"] = make(library)

    asyncio.run(main())

    x, y = (lm.Layout(specs, MESH).sharding_specs for specs in (X, Y))
    expected = {("a", 1): x, ("a", 2): x, ("b", 1): y, ("b", 2): y}
    assert {key: expected.get(key) for key in made} == {key: specs_of(each) for key, each in made.items()}
    assert 7 == len(made)


def test_a_generator_that_is_closed_late_ends_its_own_scope(library):
    """Its scope is over, the one that was opened after it goes on, and then none is open."""

    def holding():
        with scope(library, X):
            yield make(library)

    generator = holding()
    inner = next(generator)
    with scope(library, Y):
        before = make(library)
        generator.close()
        after = make(library)
    last = make(library)

    x, y = (lm.Layout(specs, MESH).sharding_specs for specs in (X, Y))
    assert [y, y, None] == [specs_of(each) for each in (before, after, last)]
    # A scope that ends with an exception leaves torch no values
    assert library == "torch" or x == specs_of(inner)
    assert get_current_session() is None


def test_a_generator_that_another_thread_closes(library):
    """It can be closed in another context and thread; then no scope is open, there or here, and another one works."""
    errors = []

    def holding():
        with scope(library, X):
            yield

    def close():
        try:
            generator.close()
            errors.append(get_current_session())
        except BaseException as error:
            errors.append(error)

    generator = holding()
    next(generator)
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    plain = make(library)
    with scope(library, Y):
        made = make(library)

    assert [None] == errors
    assert [None, lm.Layout(Y, MESH).sharding_specs] == [specs_of(each) for each in (plain, made)]
    assert get_current_session() is None


def test_an_asynchronous_generator_that_the_loop_closes(library):
    """The loop closes it in a task of its own when it ends."""

    async def holding():
        with scope(library, X):
            yield
            yield

    async def main():
        await anext(kept[0])
        return make(library)

    kept = [holding()]
    made = asyncio.run(main())

    assert specs_of(make(library)) is None
    assert library == "torch" or specs_of(made) == lm.Layout(X, MESH).sharding_specs
    assert get_current_session() is None
