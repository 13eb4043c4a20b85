"""What comes in from outside, numbers and texts of numpy among it, is plain inside; all else is refused by name."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter

import numpy as np
import pytest

import layoutmap as lm
from layoutmap.core.blocks import compute_block_shape, make_full_index, normalize_index
from layoutmap.core.uneven import apply_uneven_policy
from layoutmap.core.variables import VariableSpec, get_itemsize
from layoutmap.rules.near_misses import NearMissSearch
from layoutmap.scope.plan import make_plan

MESH = lm.Mesh(None, "batch=2,model=4")
ROW = lm.Layout(["model"], MESH)


def test_numbers_of_numpy_do_not_wrap():
    """Shapes, sizes and indices of small numpy types give what Python's ints give."""
    small, large = np.int8(100), np.array([50_000, 50_000], np.int32)
    mesh = lm.Mesh(None, {"x": np.int8(100), "y": np.int8(100)}, local_device_ids=None)

    assert 10_000_000_000 == VariableSpec("k", large, "float32").global_bytes
    assert (400,) == ROW.global_shape_from_local_shape((small,))
    assert (25,) == ROW.shard_shape((small,))
    assert (slice(25, 50),) == ROW.shard_slices((small,), np.int8(1))
    assert 10_000 == mesh.size
    assert (1, 27) == mesh.coords(np.uint8(127))
    assert 10_099 == lm.Layout(["x", "y"], lm.Mesh(None, "x=101,y=100")).offset_tuple_to_global_index(
        (small, np.int8(99))
    )
    assert "(unsharded,)" == str(
        apply_uneven_policy(lm.Layout(["x"], lm.Mesh(None, "x=1000")), (small,), "replicate")
    )
    assert (slice(0, 100),) == make_full_index((small,))
    assert (200,) == compute_block_shape((slice(np.int8(-100), small),))
    assert all(type(n) is int for n in (*normalize_index((slice(None),), (small,)),)[0].indices(100)[:2])
    assert all(type(n) is int for n in VariableSpec("k", large, "int8").shape)


@pytest.mark.parametrize("shape", [(1.5,), ("8",), (True,), (-2,)])
def test_a_size_that_is_no_whole_number_is_refused(shape: tuple[object]):
    """A shape has whole numbers only, wherever it comes in."""
    for given in (
        lambda: VariableSpec("k", shape, "float32"),
        lambda: ROW.local_shape_from_global_shape(shape),
    ):
        with pytest.raises(lm.LayoutError, match=r"the shape .* has a "):
            given()


def test_texts_of_numpy_are_written_as_plain_text():
    """Dims, patterns and names that are `np.str_` reach YAML as any text does."""
    model = np.str_("model")
    layout_map = lm.LayoutMap(lm.Mesh(None, {model: 4}, np.str_("m")), {np.str_("k"): (model, (model,))[:1]})

    assert layout_map.to_yaml() == lm.LayoutMap(lm.Mesh(None, "model=4", "m"), {"k": ("model",)}).to_yaml()
    assert {str} == {
        type(text) for text in (*layout_map, *layout_map["k"].sharding_specs, layout_map.mesh.name)
    }


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float4_e2m1fn_x2", 1),
        ("float8_e8m0fnu", 1),
        ("uint2", 0.25),
        ("quint4x2", 1),
        ("complex64", 8),
        ("bool", 1),
    ],
)
def test_element_types_that_numpy_does_not_know_have_a_size(dtype: str, size: float):
    """The name says the bits, and how many elements are packed into one."""
    assert size == get_itemsize(dtype)


def test_an_unknown_element_type_is_refused():
    """The message says what to write."""
    with pytest.raises(lm.LayoutError, match="element type 'nope' is not known"):
        get_itemsize("nope")


def test_a_map_reads_its_mesh_from_text():
    """Text means an abstract mesh of these dims; what is not a mesh is refused."""
    assert lm.LayoutMap(MESH, {"k": ("model",)}) == lm.LayoutMap("batch=2,model=4", {"k": ("model",)})
    with pytest.raises(lm.MeshError, match="7 is not a mesh"):
        lm.LayoutMap(7)


def test_one_text_is_no_list_of_devices():
    """A single name is refused with the list to write."""
    with pytest.raises(lm.MeshError, match=r"write a list: \['CPU:0'\]"):
        lm.create_mesh("x=1", devices="CPU:0")


# -- maps


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_without_a_mesh_still_has_one_slot_for_it(twin):
    """Rules and activations of a copy share one mesh, whichever brings it, and not that of the first."""
    first = lm.LayoutMap()
    again = twin(first)
    again["k"] = ROW

    assert MESH == again.activations.mesh
    with pytest.raises(lm.RuleError, match="on another mesh"):
        again.activations["layer"] = lm.Layout([None], lm.Mesh(None, "x=2"))
    assert first.mesh is None
    assert first.activations.mesh is None


def test_equality_is_the_same_from_both_sides():
    """Rules for activations are no layout map, with whatever rules."""
    bare, laid = lm.LayoutMap(MESH, {"k": ROW}), lm.LayoutMap(MESH, {"k": ROW}, {"k": ROW})

    for layout_map in (bare, laid):
        for activations in (bare.activations, laid.activations):
            assert (layout_map == activations, activations == layout_map) == (False, False)


def test_a_thread_that_changes_a_map_does_not_disturb_lookups():
    """Lookups, iteration and tables in other threads go on while rules come and go."""
    layout_map = lm.LayoutMap(MESH, {f"k{i}": ROW for i in range(50)})
    errors: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                assert ROW == layout_map["k7.kernel"]
                assert "k7" in dict(layout_map.items())
                assert len(list(layout_map)) >= 50
                assert layout_map.match("k7.kernel").rule.pattern == "k7"
                str(layout_map)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(300):
        layout_map[f"new{i}"] = ROW
        if i % 3 == 0:
            del layout_map[f"new{i}"]
    done.set()
    for thread in threads:
        thread.join()

    assert [] == errors
    assert 250 == len(layout_map)
    assert ROW == layout_map["new299"]


@pytest.mark.timeout(60)
def test_to_ask_and_add_in_turns_does_not_index_anew():
    """Three thousand rules added one by one, each after a lookup, answer as those added at once."""
    layout_map = lm.LayoutMap(MESH)
    for i in range(3000):
        if layout_map.get(f"blocks.{i}.kernel") is None:
            layout_map[rf"blocks\.{i}\.kernel$"] = ROW

    assert 3000 == len(layout_map)
    assert [17] == [rule.number for rule in layout_map.matching_rules("blocks.16.kernel")]


@pytest.mark.timeout(60)
def test_a_layout_of_thousands_of_dims_is_read():
    """Reading back takes time that grows with the dims, not with their square."""
    dims = [f"d{i}" for i in range(8000)]
    layout = lm.Layout(dims, lm.Mesh(None, [(name, 1) for name in dims]))

    assert layout == lm.Layout.from_string(layout.to_string())


def test_a_plan_of_numpy_shapes_counts_right():
    """Bytes of a plan come from plain ints."""
    plan = make_plan([VariableSpec("k", np.array([65536, 65536], np.int32), "float32")], lm.LayoutMap(MESH))

    assert 2**34 == plan.global_bytes


def test_near_misses_have_a_bound():
    """Searches go on until their comparisons are used up; a search that would need more than are left finds nothing."""
    candidates = NearMissSearch(["d1.kernel", "d2.kernel", "d1.bias"], max_comparisons=5)

    assert [["d2.kernel"], ["d1.bias"], []] == [
        candidates.find_nearest_candidates(text)[:1] for text in ("d2.kernal", "d1.bios", "d1.kernall")
    ]


@pytest.mark.timeout(60)
def test_a_plan_of_very_many_unlike_paths_is_made_and_shown():
    """Two thousand paths without a rule and a hundred rules without a path: each is a problem, in linear time."""
    words = [f"{a}{b}{c}{d}" for a in "ab" for b in "klmnopqrst" for c in "uvwxyzabcd" for d in "efghijklmn"]
    layout_map = lm.LayoutMap(MESH, {f"{a}{b}_none": (None,) for a in "qrstuvwxyz" for b in "abcdefghij"})
    plan = make_plan([VariableSpec(word, (8,), "float32") for word in words], layout_map)

    assert {"no rule": 2_000, "unused rule": 100} == Counter(p.kind for p in plan.problems)
    assert words[-1] in str(plan)
    assert words[-1] in plan.to_html()
