"""What ends TensorFlow's process, or goes wrong there without a word, is an error here, or goes right.

Each test shows first that TensorFlow still does what it is guarded against. The like for layouts alone is in
`tests/against_tensorflow`.
"""

import forked
import numpy as np
import pytest
import tensorflow as tf

import layoutmap as lm
from layoutmap.core.errors import LayoutError, LayoutMapError, MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.tensorflow.engine import engine
from layoutmap.testing.engine_contract import assert_same_bits

pytestmark = pytest.mark.every_case

dtensor = tf.experimental.dtensor

GRID = Mesh(None, "x=4,y=2")
X = Layout(["x"], GRID)
SEGMENTATION_FAULT, ABORTED, OUT_OF_MEMORY = -11, -6, 77
NAMED_BADLY = 'dtensor.Mesh(["x", "a%sb"], np.arange(2).reshape(2, 1), [0, 1], mesh.local_devices()[:2])'

FATAL = {
    "pack components of several ranks": (
        'dtensor.pack([tf.zeros((2, 1))] * 7 + [tf.zeros(2)], dtensor.Layout(["x", "unsharded"], mesh))',
        lambda: lm.dtensor.pack([tf.zeros((2, 1))] * 7 + [tf.zeros(2)], Layout(["x", None], GRID)),
        r"component 7 differs from component 0\n  component 0  float32\[2, 1\]\n  component 7  float32\[2\]",
    ),
    "the shards of an axis far beyond the rank": (
        'dtensor.Layout(["x"], mesh).num_shards(10**9)',
        lambda: X.num_shards(10**9),
        "a layout of rank 1 has no axis 1000000000",
    ),
    "the text of a layout with a bar in a name": (
        f'dtensor.Layout.from_string(dtensor.Layout(["x"], {NAMED_BADLY % "|"}).to_string())',
        lambda: Layout.from_string("sharding_specs:x, mesh:|x=2,a|b=1|0,1|0,1|CPU:0,CPU:1"),
        "'a' is not name=size",
    ),
    "the text of a mesh with a comma in a name": (
        f"dtensor.Mesh.from_string(({NAMED_BADLY % ','}).to_string())",
        lambda: Mesh.from_string("|x=2,a,b=1|0,1|0,1|CPU:0,CPU:1"),
        "'a' is not name=size",
    ),
}


@pytest.fixture(scope="module")
def endings():
    """How a process ends that makes each of the calls."""
    calls = [call for call, _, _ in FATAL.values()]
    caught = "try:\n    {}\nexcept MemoryError:\n    raise SystemExit(77)\n"
    ran = forked.wait_for_all([forked.start(forked.EIGHT_DEVICES + caught.format(call)) for call in calls])
    return dict(zip(calls, ran, strict=True))


@pytest.mark.parametrize("case", FATAL)
def test_what_ends_tensorflows_process_is_an_error_here(case, endings):
    """The call ends TensorFlow's process or fails to allocate; here it is an error with what, why and the fix."""
    call, ours, message = FATAL[case]
    ending = endings[call]

    # Another error would be one that was raised: then TensorFlow has learnt to refuse it. It looks beyond the end of a
    # list for a number after a comma, so the result depends on the bytes in memory there: no number, or another one.
    ended = ending.returncode in (SEGMENTATION_FAULT, ABORTED, OUT_OF_MEMORY)
    misread = ("ValueError: stoi", "ValueError: mesh size doesn't match number of devices")
    assert ended or any(error in ending.stderr for error in misread), ending.stderr[-2000:]
    with pytest.raises(LayoutMapError, match=message) as caught:
        ours()
    assert caught.value.why
    assert caught.value.fix


# -- where TensorFlow does not crash, and gives something wrong or says something unreadable


def mesh_put_right():
    """A scope around TensorFlow's relayout: when that fails, TensorFlow goes on computing on its mesh."""
    return lm.dtensor.run_on(GRID, engine="tensorflow")


def own_layout(*specs):
    return engine().make_native_layout(Layout(specs, GRID), len(specs))


def test_what_does_not_divide_is_named():
    """TensorFlow answers with the text of its compiler; here the axis, the sizes and the fix are named."""
    values = np.zeros(6, np.float32)
    with mesh_put_right(), pytest.raises(tf.errors.UnknownError, match="DTensorLayout"):
        dtensor.relayout(values, own_layout("x"))
    for refuse in (
        lambda: lm.dtensor.relayout(tf.zeros(6), X),
        lambda: lm.dtensor.copy_to_mesh(tf.zeros(6), X),
        lambda: lm.dtensor.call_with_layout(tf.zeros, X, 6, engine="tensorflow"),
        lambda: lm.DVariable(tf.zeros(6), layout=X),
        lambda: tf.function(lambda x: engine().relayout(x, X), autograph=False)(tf.zeros(6)),
    ):
        with pytest.raises(LayoutError, match="6 is not a multiple of 4") as caught:
            refuse()
        assert "pad axis 0 to 8" in caught.value.fix


def test_a_scalar_has_a_layout_of_rank_0():
    """TensorFlow accepts a layout of rank 1 for a scalar; here the ranks are compared."""
    assert [] == dtensor.fetch_layout(dtensor.relayout(tf.constant(1.0), own_layout(None))).sharding_specs
    with pytest.raises(LayoutError, match="a layout of rank 1 does not fit a tensor of rank 0"):
        lm.dtensor.relayout(tf.constant(1.0), Layout([None], GRID))


def test_devices_that_are_not_there_are_named():
    """TensorFlow makes a mesh of devices that do not exist, and fails at its first use; here they are named."""
    own = dtensor.create_mesh([("x", 2)], devices=["CPU:0", "CPU:77"])
    values = np.zeros(2, np.float32)
    with mesh_put_right(), pytest.raises(tf.errors.InternalError, match="CPU:77 unknown device"):
        dtensor.relayout(values, dtensor.Layout(["x"], own))
    with pytest.raises(MeshError, match=r"device '.*CPU:77' does not exist"):
        lm.dtensor.relayout(tf.zeros(2), dtensor.Layout(["x"], own))


def test_relayout_keeps_zeros_and_nans():
    """TensorFlow's relayout loses the sign of a zero; here all bits stay."""
    values = np.array([-0.0] * 8 + [np.nan] * 8, np.float32)
    cut = lm.dtensor.relayout(values, X, engine="tensorflow")
    raw = dtensor.relayout(cut, own_layout(None))

    assert not np.signbit(raw.numpy()[:8]).any()
    assert_same_bits(values, engine().to_numpy(lm.dtensor.relayout(cut, Layout([None], GRID))))


def test_autograph_passes_errors_on_and_says_nothing(capfd):
    """Our error in a `tf.function` has its own class and text, and autograph converts none of its code."""
    tensor = lm.dtensor.relayout(np.ones((6, 2), np.float32), Layout.replicated(GRID, 2))
    uneven = Layout(["x", None], GRID)
    functions = {
        "relayout": lambda x: lm.dtensor.relayout(x, uneven),
        "copy_to_mesh": lambda x: lm.dtensor.copy_to_mesh(x, uneven),
        "call_with_layout": lambda x: lm.dtensor.call_with_layout(tf.ones, uneven, [6, 2]),
        "DVariable": lambda x: lm.DVariable(x, layout=uneven),
        "fetch_layout": lambda x: lm.dtensor.fetch_layout(x),
        "unpack": lambda x: lm.dtensor.unpack(x),
        "Layout": lambda x: Layout(["z"], GRID),
    }

    for name, function in functions.items():
        with pytest.raises(LayoutMapError) as raised:
            tf.function(function)(tensor)
        assert "in user code" not in str(raised.value), name
    assert "AutoGraph" not in "".join(capfd.readouterr())


def test_an_exception_leaves_no_mesh_behind():
    """TensorFlow goes on computing on a mesh after an exception; here the scope ends."""
    native = own_layout().mesh
    around = engine().make_native_layout(Layout([], Mesh(None, "a=2")), 0).mesh
    left = []
    for run_on in (dtensor.default_mesh, lm.dtensor.run_on):
        with lm.dtensor.run_on(around, engine="tensorflow"):
            with pytest.raises(ZeroDivisionError), run_on(native):
                raise ZeroDivisionError
            left.append(dtensor.get_default_mesh())

    assert [native, around] == left
    assert dtensor.get_default_mesh() is None


def test_a_shard_can_be_read_in_full():
    """TensorFlow cannot read a variable that is sharded; here `numpy` gives all of it."""
    values = np.arange(8, dtype=np.float32)
    own = dtensor.DVariable(dtensor.relayout(values, own_layout("x")))
    with pytest.raises(tf.errors.UnimplementedError, match="non-replicated DTensor"):
        own.numpy()

    assert_same_bits(values, lm.DVariable(values, layout=X).numpy())


def counted(variable, rows):
    @tf.function(autograph=False)
    def step(rows):
        variable.assign_add(1.0)
        return tf.reduce_sum(rows)

    for _ in range(3):
        step(rows)
    return variable.numpy()


def test_a_counter_counts_steps():
    """A `tf.Variable` that a step on a mesh captures is counted up by each device; a DVariable counts the steps."""
    rows = lm.dtensor.relayout(np.ones((8, 2), np.float32), Layout(["x", None], GRID), engine="tensorflow")

    assert 3.0 < counted(tf.Variable(0.0), rows)  # up to 24, as the devices come and go
    assert 3.0 == counted(lm.DVariable(0.0, layout=Layout([], GRID)), rows)
