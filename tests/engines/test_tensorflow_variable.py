"""`DVariable`: a `tf.Variable` in a layout, and training with it by hand, without a model library."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import layoutmap as lm
from layoutmap.core.errors import EngineError, LayoutError
from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.dtensor import relayout, unpack
from layoutmap.engines.tensorflow import selfcheck
from layoutmap.engines.tensorflow.combined import StepWithWritesAtEnd
from layoutmap.engines.tensorflow.engine import engine
from layoutmap.testing.engine_contract import assert_same_bits

pytestmark = pytest.mark.every_case

dtensor = tf.experimental.dtensor

GRID = Mesh(None, "x=2,y=4")
X_Y = Layout(["x", "y"], GRID)
VALUES = np.arange(32, dtype=np.float32).reshape(4, 8)


def variable(**more):
    return lm.DVariable(VALUES, layout=X_Y, **more)


def on_grid(values, *specs):
    return relayout(values, Layout(specs, GRID), engine="tensorflow")


# -- making

FIRST_VALUES = {
    "a tensor in a layout": lambda: lm.DVariable(on_grid(VALUES, "x", "y")),
    "a tensor in the layout that is given": lambda: lm.DVariable(on_grid(VALUES, "x", "y"), layout=X_Y),
    "a variable": lambda: lm.DVariable(tf.Variable(VALUES), layout=X_Y),
    "a variable in a layout": lambda: lm.DVariable(lm.DVariable(VALUES, layout=X_Y)),
    "a plain tensor": lambda: lm.DVariable(tf.constant(VALUES), layout=X_Y),
    "numpy": lambda: lm.DVariable(VALUES, layout=X_Y),
    "lists": lambda: lm.DVariable(VALUES.tolist(), layout=X_Y),
    "a function": lambda: lm.DVariable(lambda: tf.constant(VALUES), layout=X_Y),
    "another element type": lambda: lm.DVariable(VALUES.astype(np.int32), layout=X_Y, dtype=tf.float32),
    "TensorFlow's own layout": lambda: lm.DVariable(VALUES, layout=engine().make_native_layout(X_Y, 2)),
}


@pytest.mark.parametrize("kind", FIRST_VALUES)
def test_a_variable_is_made_of(kind):
    """A variable has its first value and its layout, whatever the value was given as, and is a `tf.Variable`."""
    made = FIRST_VALUES[kind]()

    assert isinstance(made, tf.Variable)
    assert isinstance(made, dtensor.DVariable)
    native = dtensor.fetch_layout(made)
    assert engine().make_native_layout(X_Y, 2) == engine().make_native_layout(made.layout, 2) == native
    assert_same_bits(VALUES, made.numpy())


def test_a_number_is_a_variable_of_rank_0():
    """A number is held with the element type that `tf.Variable` gives it."""
    for number in (3, 2.5, True):
        made = lm.DVariable(number, layout=Layout([], GRID))

        assert tf.Variable(number).dtype == made.dtype
        assert number == made.numpy()


def test_settings_are_those_of_tf_variable():
    """Name, `trainable` and constraint are taken as by `tf.Variable`."""
    made = variable(name="kernel", trainable=False, constraint=tf.abs)

    assert "kernel:0" == made.name
    assert not made.trainable
    assert tf.abs is made.constraint
    assert "<DVariable 'kernel:0' shape=(4, 8) dtype=float32 layout=(x, y)>" == repr(made)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("a DVariable needs a layout", lambda: lm.DVariable(VALUES)),
        (
            "is in a different layout",
            lambda: lm.DVariable(on_grid(VALUES, "x", "y"), layout=Layout(["y", "x"], GRID)),
        ),
        ("w: axis 1 cannot be split evenly", lambda: lm.DVariable(VALUES[:, :3], layout=X_Y, name="w")),
        ("a layout of rank 2 does not fit a tensor of rank 0", lambda: lm.DVariable(3.0, layout=X_Y)),
    ],
)
def test_a_variable_without_a_layout_that_fits_is_refused(words, make):
    """No layout, another one than the value's, and one that does not fit are refused, with the fix."""
    with pytest.raises(LayoutError, match=words) as caught:
        make()
    assert caught.value.fix


@pytest.mark.parametrize("value", ["text", [["a"], ["b"]], None, tf.constant("text")])
def test_what_is_no_number_is_refused(value):
    """Texts and objects cannot lie in a layout."""
    with pytest.raises(EngineError, match="cannot shard an array of"):
        lm.DVariable(value, layout=Layout([], GRID))


def test_a_variable_is_made_while_tensorflow_traces():
    """Inside a `tf.function` a variable is made of a function or of plain values; a tensor of the trace is refused."""
    made = []

    @tf.function(autograph=False)
    def step(x):
        made.append(lm.DVariable(lambda: tf.constant(VALUES), layout=X_Y))
        made.append(lm.DVariable(VALUES, layout=X_Y))
        with pytest.raises(EngineError, match="has no values yet"):
            lm.DVariable(x, layout=X_Y)
        return x

    step(tf.constant(VALUES))

    for each in made:
        assert_same_bits(VALUES, each.numpy())


@pytest.mark.parametrize("kind", ["a function", "values", "a tensor on the mesh"])
def test_a_variable_is_made_in_a_function_on_the_mesh(kind, monkeypatch):
    """`tf.init_scope` in a `tf.function` in `run_on` makes one variable, also as the first use of DTensor."""
    monkeypatch.setattr(selfcheck, "_is_correct", {})
    made = []

    @tf.function
    def step():
        with tf.init_scope():
            if not made:
                value = {
                    "a function": lambda: lambda: tf.ones((4, 8)),
                    "values": lambda: np.ones((4, 8), np.float32),
                    "a tensor on the mesh": lambda: lm.dtensor.call_with_layout(tf.ones, X_Y, (4, 8)),
                }[kind]()
                made.append(lm.DVariable(value, layout=X_Y))
        made[0].assign_add(tf.ones((4, 8)))
        return tf.reduce_sum(made[0])

    with lm.dtensor.run_on(GRID):
        assert [64.0, 96.0] == [float(step()) for _ in range(2)]
    assert X_Y == made[0].layout


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("made", ["on the mesh", "before"])
def test_a_generator_draws_the_numbers_of_one_device(made, how):
    """`tf.random.Generator` counts once in `run_on`; a `tf.function` there refuses one that is on no mesh."""
    plain, generator = (tf.random.Generator.from_seed(1) for _ in range(2))
    with lm.dtensor.run_on(GRID):
        if made == "on the mesh":
            generator = tf.random.Generator.from_seed(1)

        def draw():
            return generator.normal((4, 8)), tf.random.stateless_uniform((4, 8), (1, 2))

        if (made, how) == ("before", "compiled"):
            with pytest.raises(lm.ScopeError, match=r"a tf\.function in run_on writes to a variable"):
                tf.function(draw)()
            assert_same_bits(plain.state.numpy(), generator.state.numpy())
            return
        draw = tf.function(draw) if how == "compiled" else draw
        drawn = [draw() for _ in range(3)]

    for numbers, stateless in drawn:
        np.testing.assert_allclose(numbers.numpy(), plain.normal((4, 8)).numpy(), rtol=1e-6)
        assert_same_bits(tf.random.stateless_uniform((4, 8), (1, 2)).numpy(), stateless.numpy())


DRAWS = {
    "RandomStandardNormal": lambda: tf.random.normal((4, 8)),
    "RandomUniform": lambda: tf.random.uniform((4, 8)),
    "RandomUniformInt": lambda: tf.random.uniform((4, 8), 0, 9, tf.int32),
    "TruncatedNormal": lambda: tf.random.truncated_normal((4, 8)),
    "RandomShuffle": lambda: tf.random.shuffle(tf.range(32.0)),
    "RandomGamma": lambda: tf.random.gamma((4, 8), 2.0),
    "RandomPoissonV2": lambda: tf.random.poisson((4, 8), 2.0),
    "Multinomial": lambda: tf.random.categorical(tf.zeros((4, 8)), 8),
    "StatelessShuffle": lambda: tf.random.experimental.stateless_shuffle(tf.range(32.0), (1, 2)),
    "StatelessRandomGammaV3": lambda: tf.random.stateless_gamma((4, 8), (1, 2), 2.0),
    "StatelessMultinomial": lambda: tf.random.stateless_categorical(tf.zeros((4, 8)), 8, (1, 2)),
    "dropout": lambda: tf.nn.dropout(tf.ones((4, 8)), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_operations_on_the_mesh(name):
    """In `run_on` they draw the numbers of one device eagerly, and a `tf.function` refuses them by name."""
    drawn = []
    for mesh in (None, GRID):
        tf.random.set_seed(5)
        with lm.dtensor.run_on(mesh) if mesh else contextlib.nullcontext():
            drawn.append([DRAWS[name]() * 1 for _ in range(2)])

    for expected, actual in zip(*drawn, strict=True):
        assert_same_bits(expected.numpy(), engine().to_numpy(actual))
    operation = "RandomUniform" if name == "dropout" else name
    with lm.dtensor.run_on(GRID), pytest.raises(EngineError, match=f"draws random numbers with {operation},"):
        tf.function(DRAWS[name])()


def test_a_plain_variable_is_written_once_on_the_mesh():
    """In `run_on` a `tf.Variable` that was made before counts each step once."""
    counter = tf.Variable(0.0)
    with lm.dtensor.run_on(GRID):
        for _ in range(3):
            counter.assign_add(tf.reduce_sum(tf.ones(3)) / 3)

    assert 3.0 == counter.numpy()


# -- reading, copying, giving a value


def test_a_variable_is_read_gathered():
    """All common ways to numpy give the whole value, in the element type that is asked for."""
    held = variable()

    assert_same_bits(VALUES, held.numpy())
    assert_same_bits(VALUES, np.array(held))
    assert_same_bits(VALUES.astype(np.float64), np.asarray(held, dtype=np.float64))
    assert 2.5 == float(lm.DVariable(2.5, layout=Layout([], GRID)))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_copies_have_the_same_layout(again):
    """A deep copy and what comes out of a pickle have the value, layout and settings, and a life of their own."""
    held = variable(name="kernel", trainable=False)
    made = again(held)
    held.assign(VALUES * 2)

    assert isinstance(made, lm.DVariable)
    assert X_Y == made.layout == engine().get_layout(made)
    assert ("kernel:0", False) == (made.name, made.trainable)
    assert_same_bits(VALUES, made.numpy())


GIVEN = {
    "numpy": lambda: VALUES * 3,
    "numbers of 64 bits": lambda: VALUES.astype(np.float64) * 3,
    "lists": lambda: (VALUES * 3).tolist(),
    "a plain tensor": lambda: tf.constant(VALUES * 3),
    "a plain variable": lambda: tf.Variable(VALUES * 3),
    "the same layout": lambda: on_grid(VALUES * 3, "x", "y"),
    "another layout": lambda: on_grid(VALUES * 3, "y", None),
    "another mesh": lambda: relayout(VALUES * 3, Layout(["a", None], Mesh(None, "a=4")), engine="tensorflow"),
    "another DVariable": lambda: lm.DVariable(VALUES * 3, layout=Layout([None, "x"], GRID)),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_value_is_given_in_any_form(kind):
    """A value, plain or in any layout, is assigned, added and subtracted; the variable keeps its layout."""
    for method, expected in (
        ("assign", VALUES * 3),
        ("assign_add", VALUES * 4),
        ("assign_sub", VALUES - VALUES * 3),
    ):
        held = variable()

        assert held is getattr(held, method)(GIVEN[kind]())
        assert_same_bits(expected, held.numpy())
        assert X_Y == engine().get_layout(held)


@pytest.mark.parametrize("autograph", [False, True])
@pytest.mark.parametrize("kind", ["the same layout", "another layout", "lists"])
def test_a_value_is_given_in_a_compiled_function(kind, autograph):
    """In a `tf.function` a value in any layout of the mesh is assigned; the variable keeps its layout."""
    held, value = variable(), GIVEN[kind]()

    @tf.function(autograph=autograph)
    def give():
        held.assign(value)
        held.assign_add(held * 2.0)
        held.assign_sub(value)

    give()

    assert_same_bits(VALUES * 6, held.numpy())
    assert X_Y == engine().get_layout(held)


@pytest.mark.parametrize("compiled", [False, True])
def test_replicas_do_not_share_memory(compiled):
    """Adding to a variable adds once on each device, and changes neither its copies nor what it was made of."""
    source = np.zeros(1 << 16, np.float32)
    layout = Layout([None], GRID)
    tensor = relayout(source, layout, engine="tensorflow")
    key = tf.constant([1, 2])
    program = InitializerProgram("zeros of replicas", key, lambda seed: tf.zeros(1 << 16))
    drawn = engine().create_initial_values(
        {"w": Assignment(VariableSpec("w", (1 << 16,), "float32"), layout)},
        {"w": Initializer(global_value=lambda: source, program=program)},
    )["w"]
    for start in (tensor, drawn):
        held, other = lm.DVariable(start), lm.DVariable(start)
        one = on_grid(np.ones(1 << 16, np.float32), None)

        def add(held=held, one=one):
            held.assign_add(one)

        add = tf.function(add, autograph=False) if compiled else add
        for _ in range(3):
            add()

        assert [3.0] * 8 == [part.max() for part in unpack(held)] == [part.min() for part in unpack(held)]
        assert 0 == source.max() == max(part.max() for array in (start, other) for part in unpack(array))


def test_a_value_of_another_shape_is_refused():
    """Nothing is repeated to fill a variable, as in `tf.Variable`."""
    held = variable(name="w")
    for value in (1.0, VALUES[:2], VALUES[:, :1]):
        for method in (held.assign, held.assign_add, held.assign_sub):
            with pytest.raises(LayoutError, match="w:0: the assigned value has a different shape"):
                method(value)

    assert_same_bits(VALUES, held.numpy())


def test_without_reading_assigning_gives_nothing():
    """`read_value=False` is TensorFlow's: assigning eagerly then gives `None`."""
    assert variable().assign(VALUES, read_value=False) is None


# -- training by hand

RATE, DECAY = 0.125, 0.5


class Net(tf.Module):
    """Two dense layers and a momentum for each variable."""

    def __init__(self, make):
        super().__init__()
        rng = np.random.default_rng(5)
        first = rng.normal(size=(6, 8)).astype(np.float32)
        second = rng.normal(size=(8, 2)).astype(np.float32)
        self.first, self.second = make(first, (None, "y")), make(second, ("y", None))
        self.bias = make(np.zeros(8, np.float32), ("y",))
        self.slots = [
            make(np.zeros(v.shape, np.float32), specs)
            for v, specs in ((self.first, (None, "y")), (self.second, ("y", None)), (self.bias, ("y",)))
        ]
        self.steps = make(np.int32(0), ())
        self.compiled = tf.function(self.step, autograph=False)

    def weights(self):
        return [self.first, self.second, self.bias]

    def step(self, x, y):
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(x, self.first) + self.bias)
            loss = tf.reduce_mean(tf.square(tf.matmul(hidden, self.second) - y))
        gradients = tape.gradient(loss, self.weights())
        for held, slot, gradient in zip(self.weights(), self.slots, gradients, strict=True):
            slot.assign(slot * DECAY + gradient)
            held.assign_sub(slot * RATE)
        self.steps.assign_add(1)
        return loss


def in_layouts():
    return Net(lambda values, specs: lm.DVariable(values, layout=Layout(specs, GRID)))


def batches(number):
    rng = np.random.default_rng(6)
    return [tuple(rng.normal(size=(16, n)).astype(np.float32) for n in (6, 2)) for _ in range(number)]


def train(net, number, place=lambda values: values):
    return [float(engine().to_numpy(net.compiled(place(x), place(y)))) for x, y in batches(number)]


def in_batches(values):
    return on_grid(values, "x", None)


def test_training_by_hand_is_that_of_one_device():
    """Steps with momentum in a `tf.function` give the losses and weights of plain variables, in unchanged layouts."""
    plain, cut = Net(lambda values, _: tf.Variable(values)), in_layouts()
    expected, actual = train(plain, 4), train(cut, 4, in_batches)

    np.testing.assert_allclose(expected, actual, rtol=1e-5)
    assert expected[-1] < expected[0]
    assert 4 == plain.steps.numpy() == cut.steps.numpy()
    for one, other in zip(plain.weights() + plain.slots, cut.weights() + cut.slots, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-6)
        assert other.layout == engine().get_layout(other)


def test_a_module_finds_its_variables():
    """A `tf.Module` finds variables in layouts as it finds plain ones."""
    net = in_layouts()

    assert 7 == len(net.variables) == len(net.trainable_variables)
    assert {id(v) for v in net.weights()} <= {id(v) for v in net.variables}


def test_a_checkpoint_is_exact(tmp_path):
    """`tf.train.Checkpoint` saves and restores a module bit for bit; restored variables keep their layouts."""
    saved, fresh, later = in_layouts(), in_layouts(), in_layouts()
    train(saved, 2, in_batches)
    path = tf.train.Checkpoint(net=saved).write(str(tmp_path / "net"))
    train(fresh, 1, in_batches)
    tf.train.Checkpoint(net=fresh).read(path).assert_consumed()
    train(later, 2, in_batches)

    assert len(saved.variables) == len(fresh.variables) == 7
    for one, other in zip(saved.variables, fresh.variables, strict=True):
        assert_same_bits(one.numpy(), other.numpy())
        assert one.layout == engine().get_layout(other)
    assert train(saved, 2, in_batches) == train(fresh, 2, in_batches) == train(later, 2, in_batches)


def test_a_checkpoint_goes_between_one_device_and_many(tmp_path):
    """A checkpoint of plain variables is read into variables in layouts, and the other way, bit for bit."""
    plain, cut = Net(lambda values, _: tf.Variable(values * 3)), in_layouts()
    path = tf.train.Checkpoint(net=plain).write(str(tmp_path / "plain"))
    tf.train.Checkpoint(net=cut).read(path).assert_consumed()
    again = Net(lambda values, _: tf.Variable(values))
    path = tf.train.Checkpoint(net=cut).write(str(tmp_path / "cut"))
    tf.train.Checkpoint(net=again).read(path).assert_consumed()

    for one, two, three in zip(plain.variables, cut.variables, again.variables, strict=True):
        assert_same_bits(one.numpy(), two.numpy())
        assert_same_bits(one.numpy(), three.numpy())


# -- steps whose sums over the mesh are sent together


def momentum(a, b, x):
    """Each sum is written, read, and written to the other variable."""
    for sign in (1, -1):
        b.assign(b * 0.5 + sign * tf.reduce_sum(x * 2, 0))
        a.assign_add(b)
        a.assign_sub(tf.reduce_sum(x, 0) * 0.25)
    return a + 0, tf.convert_to_tensor(b)


def write_in_a_condition(a, b, x):
    a.assign_add(tf.reduce_sum(x, 0))

    def add(delta):
        a.assign_add(delta)
        return 0

    tf.cond(tf.reduce_sum(b) > 4.0, lambda: add(b), lambda: add(-b))
    b.assign(a * 2)
    return a + b


def read_in_a_condition(a, b, x):
    a.assign_add(tf.reduce_sum(x, 0))
    b.assign_add(tf.cond(tf.reduce_sum(a) > 4.0, lambda: a * 2, lambda: a - 1))
    return a + b


def write_in_a_function(a, b, x):
    a.assign_add(tf.reduce_sum(x, 0))
    tf.function(lambda: b.assign_add(a))()
    return a * b


def differentiate_behind_a_write(a, b, x):
    b.assign(b + tf.reduce_sum(x, 0))
    with tf.GradientTape() as tape:
        a.assign(a * b)
        loss = tf.reduce_sum(a * a * tf.reduce_sum(x, 0))
    b.assign_add(tape.gradient(loss, a))
    return a + b


def read_statistics_behind_a_write(a, b, x):
    with tf.GradientTape() as tape:
        read = a * 2
        b.assign(b + read)
        loss = tf.reduce_sum(read * b * tf.reduce_sum(x, 0))
    return tape.gradient(loss, a)


@pytest.mark.parametrize(
    ("step", "writes_at_end"),
    [
        (momentum, True),
        (read_in_a_condition, True),
        (read_statistics_behind_a_write, True),
        (write_in_a_condition, False),
        (write_in_a_function, False),
        (differentiate_behind_a_write, False),
    ],
)
def test_a_step_whose_sums_are_combined_reads_its_own_writes(step, writes_at_end):
    """Two steps have the numbers of plain variables. A step that cannot write at its end is not combined."""
    rows = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    plain = [tf.Variable(VALUES[1] / 8), tf.Variable(VALUES[2] / 8, trainable=False)]
    held = [
        lm.DVariable(each.numpy(), layout=Layout(["y"], GRID), trainable=each.trainable) for each in plain
    ]
    combined = StepWithWritesAtEnd(lambda x: step(*held, x), autograph=False)
    one_by_one = tf.function(lambda x: step(*plain, x), autograph=False)

    for _ in range(2):
        expected = tf.nest.flatten([one_by_one(tf.constant(rows)), plain])
        actual = tf.nest.flatten([combined(on_grid(rows, "x", None)), held])
        for e, a in zip(expected, actual, strict=True):
            np.testing.assert_allclose(engine().to_numpy(a), e.numpy(), rtol=1e-5)
    assert combined.writes_at_end == writes_at_end
