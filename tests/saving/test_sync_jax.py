"""A sync on JAX moves weights bit for bit, sends the planned bytes, compiles once, and is all or nothing."""

import itertools
import re
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EVERYTHING, xla_settings
from engines import several_processes
from flax import nnx
from hlo_proto import sent_by_text

import layoutmap as lm
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.engines.jax import moving
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import draw_sharding_specs

PROCESSES = ("jax",)
WORKER = Path(__file__).with_name("sync_jax_process.py")
MESHES = ("batch=2,model=4", "model=8", "batch=4,model=2", "a=2,b=2,c=2", "x=4,y=2", "x=8")
HALVES = (Mesh([f"CPU:{n}" for n in range(4)], "x=2,y=2"), Mesh([f"CPU:{n}" for n in range(4, 8)], "m=4"))
PERMUTE = re.compile(r" = (\w+)\[([\d,]*)\]\S* collective-permute\(.*source_target_pairs=(\{\{.*?\}\})")
SIZES = {"f32": 4, "bf16": 2, "u16": 2}


def draw_pair(seed):
    """Two trees of arrays of equal shapes, on two meshes, in other layouts and element types."""
    choices = Choices.from_seed(seed)
    meshes = Mesh(None, choices.pick(*MESHES)), Mesh(None, choices.pick(*MESHES))
    if choices.draw_true_once_in(4):
        meshes = HALVES if choices.draw_true_once_in(2) else (meshes[0], choices.pick(*HALVES))
    shapes = [
        tuple(choices.pick(8, 16, 24) for _ in range(choices.pick(2, 1, 3, 0)))
        for _ in range(choices.pick(4, 7))
    ]
    dtypes = [(choices.pick("float32", "bfloat16"), choices.pick("float32", "bfloat16")) for _ in shapes]
    rng, engine = np.random.default_rng(seed), get_engine("jax")
    trees = []
    for end, mesh in enumerate(meshes):
        arrays = {}
        for n, (shape, names) in enumerate(zip(shapes, dtypes, strict=True)):
            values = rng.normal(size=shape).astype(jnp.dtype(names[end]))
            layout = lm.Layout(draw_sharding_specs(choices, mesh, shape, "error"), mesh)
            arrays[f"layer{n}"] = engine.relayout(jnp.asarray(values), layout)
        trees.append(arrays)
    return trees


@pytest.fixture
def programs(monkeypatch):
    """Texts of the compiled programs, and the bytes of arrays that went from device to device outside of them."""
    texts, sent, real_jit, real_put = [], [], jax.jit, jax.device_put

    def jit(function, **options):
        made = real_jit(function, **options)

        class Compiled:
            lower = made.lower

            def __call__(self, *args):
                texts.append(made.lower(*args).compile().as_text())
                return made(*args)

        return Compiled()

    def put(values, places):
        if isinstance(values, list):
            pairs = zip(values, places, strict=True)
            sent.extend(
                v.nbytes
                for v, place in pairs
                if isinstance(v, jax.Array) and v.sharding.device_set != place.device_set
            )
        return real_put(values, places)

    class Jax:
        def __getattr__(self, name):
            return {"jit": jit, "device_put": put}.get(name) or getattr(jax, name)

    monkeypatch.setattr(moving, "jax", Jax())
    return texts, sent


def count_sent_bytes(text):
    """Bytes that devices send each other in a program."""
    by_kind = sent_by_text(text, 8)
    assert {"permute", "all_gather", "all_to_all"} >= by_kind.keys()
    total = 8 * (
        by_kind.get("all_gather", 0) + by_kind.get("all_to_all", 0)
    )  # each device sends equally much
    for dtype, shape, pairs in PERMUTE.findall(text):
        size = SIZES[dtype] * int(np.prod([int(n) for n in shape.split(",") if n]))
        total += size * sum(a != b for a, b in re.findall(r"(\d+),(\d+)", pairs))
    return total


@pytest.mark.parametrize("part", range(10))
def test_drawn_pairs_sync_bit_for_bit_with_the_planned_bytes(part, programs):
    """On a hundred pairs of drawn meshes and layouts, all values arrive, and programs send the planned bytes."""
    texts, sent = programs
    for seed in range(part * 10, part * 10 + (10 if EVERYTHING or part else 2)):
        texts.clear()
        sent.clear()
        trainer, sampler = draw_pair(seed)
        sync = lm.plan_sync(trainer, sampler)
        synced = sync(verify=True)

        assert sync.plan.num_bytes == sum(map(count_sent_bytes, texts)) + sum(sent), seed
        for name, old in sampler.items():
            new = synced[name]
            assert (old.dtype, old.sharding) == (new.dtype, new.sharding)
            np.testing.assert_array_equal(
                np.asarray(trainer[name].astype(new.dtype)), np.asarray(new), f"{seed} {name}"
            )


def test_the_trainer_may_donate_its_arrays_after_a_sync():
    """On drawn pairs of meshes and layouts the sampler keeps its values, dtypes, and shardings."""
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    for seed in range(50 if EVERYTHING else 3):
        trainer, sampler = draw_pair(seed)
        expected = {name: np.asarray(array.astype(sampler[name].dtype)) for name, array in trainer.items()}
        synced = lm.plan_sync(trainer, sampler)(verify=True)
        for array in trainer.values():
            donate(array)
        for name, old in sampler.items():
            assert (old.dtype, old.sharding) == (synced[name].dtype, synced[name].sharding)
            np.testing.assert_array_equal(expected[name], np.asarray(synced[name]), f"{seed} {name}")


class Policy(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(self.up(x), use_running_average=True))


def make_policies():
    maps = (
        lm.LayoutMap(lm.create_mesh("batch=4,model=2"), {r".*kernel": ("batch", None)}, rest="replicated"),
        lm.LayoutMap(lm.create_mesh("model=4,rest=2"), {r".*kernel": (None, "model")}, rest="replicated"),
    )
    return [
        m.build(lambda n=n: Policy(nnx.Rngs(n)), library="jax", progress=False) for n, m in enumerate(maps)
    ]


def read_values(model):
    """Weights and moving statistics by path, without random states."""
    found = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return {".".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in found}


def test_two_processes_sync_bit_for_bit(tmp_path):
    """Trees on all devices, on some of both processes, and on those of one process move in two processes."""
    (port,) = several_processes.free_ports(1)
    count = 40 if EVERYTHING else 4
    results = several_processes.run(WORKER, tmp_path, [xla_settings(4)] * 2, f"127.0.0.1:{port}", str(count))

    assert [[{"wrong": [], "version": 1}] * count] * 2 == [pairs for pairs, _ in results]


def test_trained_buffers_move_and_random_states_do_not():
    """After a sync a model of nnx has the weights and statistics of the other one, in its own Variables."""
    trainer, sampler = make_policies()
    trainer.norm.mean.set_value(trainer.norm.mean.get_value() + 3)
    variables, seeds = sampler.up.kernel, sampler.drop.rngs.key.get_value()
    sync = lm.plan_sync(trainer, sampler)

    assert sampler is sync()
    assert variables is sampler.up.kernel
    assert (None, "model") == tuple(sampler.up.kernel.get_value().sharding.spec)
    assert (
        jax.random.key_data(seeds).tolist() == jax.random.key_data(sampler.drop.rngs.key.get_value()).tolist()
    )
    expected, actual = read_values(trainer), read_values(sampler)
    assert {name: v.tolist() for name, v in expected.items()} == {
        name: v.tolist() for name, v in actual.items()
    }
    assert 1 == sync.version


def test_programs_are_compiled_once():
    """After the first sync, neither a sync nor a step of either model compiles anything."""
    trainer, sampler = make_policies()
    inputs = jnp.ones((8, 8))

    @nnx.jit
    def train(model, x):
        gradients = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))

    sample = nnx.jit(lambda model, x: model(x))

    train(trainer, inputs)  # the compiler chooses layouts, and keeps these
    sync = lm.plan_sync(trainer, sampler)

    def go_on():
        train(trainer, inputs)
        sync()
        return sample(sampler, inputs)

    first = go_on()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    try:
        second, third = go_on(), go_on()
    finally:
        jax.monitoring.clear_event_listeners()

    assert [] == compiled
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)


def interrupt_after(number, action):
    """Ctrl-C at the n-th line of the library that an action runs; whether it was interrupted, and the lines."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "layoutmap" not in frame.f_code.co_filename or "test_" in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True, count
    finally:
        sys.settrace(before)
    return False, count


def test_an_interrupted_sync_leaves_one_version():
    """Wherever Ctrl-C comes, the sampler has all the old weights or all the new ones, and its version says which."""
    trainer, sampler = make_policies()
    sync = lm.plan_sync(trainer, sampler)
    sync()
    _, lines = interrupt_after(-1, sync)
    outcomes = []
    for number in [*range(1, lines, lines // (60 if EVERYTHING else 10)), *range(lines - 40, lines + 20, 10)]:
        for each in (trainer.up, trainer.down):
            each.kernel.set_value(each.kernel.get_value() + 1)
        old, version = read_values(sampler), sync.version
        interrupted, _ = interrupt_after(number, sync)
        new = read_values(trainer) if sync.version > version else old
        assert {name: v.tolist() for name, v in new.items()} == {
            n: v.tolist() for n, v in read_values(sampler).items()
        }
        outcomes.append((interrupted, sync.version > version))

    assert {(True, False), (False, True)} <= set(outcomes)


def test_a_sampler_that_missed_a_sync_is_reported():
    """A guard raises at the next step of a sampler if its trainer has synced another one, or if its own sync failed."""
    trainer, first = make_policies()
    _, second = make_policies()
    syncs = [lm.plan_sync(trainer, sampler) for sampler in (first, second)]
    guards = [lm.guard(sampler, every=10) for sampler in (first, second)]
    for each in (*syncs, *guards, syncs[0], guards[0]):
        each()
    missed = "the sampler has version 1 of its trainer's weights, and version 2 was synced"
    with pytest.raises(lm.PlanError, match=missed):
        guards[1]()
    syncs[1]()
    guards[1]()
    assert [2, 2] == [sync.version for sync in syncs]

    syncs[1](version=7)
    with pytest.raises(lm.PlanError, match="version 7 was synced"):
        guards[0]()
    _, lines = interrupt_after(-1, syncs[0])
    guards[0]()
    interrupt_after(lines // 2, lambda: syncs[0](version=8))
    with pytest.raises(lm.PlanError, match=r"last sync of this sampler failed or was not called"):
        guards[0]()


def test_a_tree_that_missed_a_sync_is_reported():
    """A guard finds a tree that missed a sync of another one, one whose new tree was dropped, and a failed sync."""
    (trainer, first), (_, second) = draw_pair(3), draw_pair(3)
    syncs = [lm.plan_sync(trainer, sampler) for sampler in (first, second)]
    guard = lm.guard(second, every=10)
    guard()
    old, second = second, syncs[1]()
    guard(second)
    with pytest.raises(
        lm.PlanError, match="the sampler has version 0 of its trainer's weights, and version 1"
    ):
        guard(old)

    trainer = jax.tree.map(lambda array: array + 1, trainer)  # an update
    syncs[0](trainer)
    first = syncs[0](trainer)
    with pytest.raises(
        lm.PlanError, match="has version 1 of its trainer's weights, and version 2 was synced"
    ):
        guard(second)
    second = syncs[1](trainer)
    guard(second)
    lm.guard(first)()
    assert [2, 2] == [sync.version for sync in syncs]
    lm.plan_sync(trainer, draw_pair(3)[1])(version=9)
    with pytest.raises(lm.PlanError, match="version 9 was synced"):
        guard(second)


def test_an_interrupt_while_arrays_are_replaced_waits(monkeypatch):
    """Ctrl-C between two variables is raised once all are replaced."""
    trainer, sampler = make_policies()
    sync = lm.plan_sync(trainer, sampler)
    real = nnx.Variable.set_raw_value

    def set_raw_value(self, *args, **options):
        signal.raise_signal(signal.SIGINT)
        return real(self, *args, **options)

    monkeypatch.setattr(nnx.Variable, "set_raw_value", set_raw_value)
    with pytest.raises(KeyboardInterrupt):
        sync()
    monkeypatch.undo()

    assert 1 == sync.version
    expected, actual = read_values(trainer), read_values(sampler)
    assert {name: v.tolist() for name, v in expected.items()} == {
        name: v.tolist() for name, v in actual.items()
    }


def test_a_wrong_value_is_found_before_anything_is_replaced(monkeypatch):
    """With `verify`, an array that arrives with one other element is an error, and the sampler is as it was."""
    trainer, sampler = draw_pair(3)
    sync = lm.plan_sync(trainer, sampler)
    real = sync._get_steps_with_movers

    def get_movers(*args):
        def spoil(move):
            return lambda arrays: [
                a.at[(0,) * a.ndim].add(1) if n == 1 else a for n, a in enumerate(move(arrays))
            ]

        return [(numbers, spoil(move)) for numbers, move in real(*args)]

    monkeypatch.setattr(sync, "_get_steps_with_movers", get_movers)
    with pytest.raises(lm.CheckpointError, match="1 variable arrived with wrong values") as error:
        sync(verify=True)

    assert "layer1" in str(error.value)
    assert 0 == sync.version


def place(values, mesh, *specs):
    return get_engine("jax").relayout(jnp.asarray(values), lm.Layout(specs, mesh))


def make_fused():
    """Three matrices, and a sampler that has them as one, and the lower half of the first."""
    here, there = Mesh(None, "batch=2,model=4"), Mesh(None, "x=8")
    q, k, v = (np.arange(128, dtype=np.float32).reshape(16, 8) + 1000 * n for n in range(3))
    trainer = {
        "q": place(q, here, "batch", "model"),
        "k": place(k, here, "model", None),
        "v": place(v, here, None, "model"),
    }
    sampler = {
        "qkv": place(np.zeros((3, 8, 16)), there, None, "x", None),
        "low": place(np.zeros((8, 8)), there, "x", None),
    }
    names = {
        "qkv": {"from": ["q", "k", "v"], "axes": "a b -> three b a"},
        "low": {"from": "q", "axes": "(1/2 a) b -> a b"},
    }
    return trainer, sampler, names, {"qkv": np.stack([q.T, k.T, v.T]), "low": q[8:]}


@pytest.mark.parametrize("donate", [False, True])
def test_fused_and_split_weights_move(donate):
    """Names and axes follow a name table, as in a load."""
    trainer, sampler, names, expected = make_fused()
    synced = lm.plan_sync(trainer, sampler, names=names)(verify=True, donate=donate)

    assert {name: v.tolist() for name, v in expected.items()} == {
        n: np.asarray(v).tolist() for n, v in synced.items()
    }


def test_all_problems_are_raised_at_once():
    """Variables without a counterpart, of other shapes or of other kinds of numbers are refused together."""
    mesh = Mesh(None, "x=8")
    trainer = {
        "a": place(np.zeros((8, 8)), mesh, "x", None),
        "b": place(np.zeros(8), mesh, "x"),
        "c": place(np.zeros(8), mesh, "x"),
    }
    sampler = {
        "a": place(np.zeros((8, 4)), mesh, "x", None),
        "b": place(np.zeros(8, np.int32), mesh, "x"),
        "d": place(np.zeros(8), mesh, "x"),
    }
    with pytest.raises(lm.PlanError) as error:
        lm.plan_sync(trainer, sampler)

    found = {problem.subject: problem.kind for problem in error.value.problems}
    assert {"a": "shape", "b": "dtype", "c": "unmatched", "d": "unmatched"} == found
    assert all(problem.why and problem.fix for problem in error.value.problems)


def test_variables_can_be_left_out():
    """What `ignore` names is listed as left out, and keeps its values, also if both ends have it."""
    mesh = Mesh(None, "x=8")
    trainer = {name: place(np.ones(8), mesh, "x") for name in ("a", "base", "critic")}
    sampler = {name: place(np.full(8, 5.0), mesh, None) for name in ("a", "base", "cache")}
    sync = lm.plan_sync(trainer, sampler, ignore=["base", "critic", "cache"])
    synced = sync()

    assert (("sampler", "base"), ("sampler", "cache"), ("trainer", "critic")) == sync.plan.left_out
    assert "left out of the trainer: critic\nleft out of the sampler: base, cache" in str(sync)
    assert {"a": 1.0, "base": 5.0, "cache": 5.0} == {name: float(each[7]) for name, each in synced.items()}


def test_a_model_that_is_no_longer_as_planned_is_refused():
    """A trainer whose arrays have other layouts than in the plan is refused, and nothing changes."""
    mesh = Mesh(None, "x=8")
    trainer, sampler = {"a": place(np.ones(8), mesh, "x")}, {"a": place(np.zeros(8), mesh, None)}
    sync = lm.plan_sync(trainer, sampler)
    with pytest.raises(lm.PlanError, match="the trainer has changed since the plan"):
        sync({"a": place(np.ones(8), mesh, None)})
    in_host_memory = lm.dtensor.relayout(trainer["a"], lm.Layout(["x"], mesh, memory="pinned_host"))
    with pytest.raises(lm.PlanError, match="the trainer has changed since the plan"):
        sync({"a": in_host_memory})

    assert 0 == sync.version


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_padded_arrays_are_synced():
    """Weights with axes that do not divide reach other layouts, padded or not, and their values are verified."""

    def make():
        return {"table": jnp.arange(104.0).reshape(13, 8), "bias": jnp.arange(16.0)}

    maps = [
        lm.LayoutMap(mesh, {"table": table, "bias": bias}, uneven="pad")
        for mesh, table, bias in (
            ("batch=2,model=4", ("model", None), ("model",)),
            ("x=4,y=2", (None, ("x", "y")), ("y",)),
            ("x=8", ("x", None), ("x",)),
        )
    ]
    for one, other in itertools.permutations(maps, 2):
        trainer = one.build(make, library="jax")
        sampler = other.build(lambda: jax.tree.map(jnp.zeros_like, make()), library="jax")
        synced = lm.plan_sync(trainer, sampler)(verify=True)
        assert all(np.array_equal(value, np.asarray(synced[name])) for name, value in make().items())
        assert lm.inspect(sampler).mesh == lm.inspect(synced).mesh
