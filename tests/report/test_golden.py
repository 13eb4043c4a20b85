"""The whole text of each view, for one model with one of everything: read it as a user would, line by line.

The HTML of notebooks is in `tests/golden`: `python tests/test_golden.py` writes it anew; read what changed.
"""

from pathlib import Path

import pytest

import layoutmap as lm
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.scope.plan import make_plan

GOLDEN = Path(__file__).with_name("golden")
MESH = lm.Mesh(None, "batch=2,model=4")


def derived(parent, path, shape, axes, parent_shape, dtype="float32", kind=Kind.WEIGHT):
    return VariableSpec(path, shape, dtype, kind, parent=parent, axes=axes, parent_shape=parent_shape)


def one_of_each():
    """A model and a map with each thing that a plan can have to say."""
    variables = [VariableSpec("tokens", (32, 16), "bfloat16", aliases=("head",))]
    for block in ("blocks.0", "blocks.1"):
        kernel = f"{block}.up.kernel"
        variables += [
            VariableSpec(kernel, (16, 64), "float32"),
            derived(kernel, f"{block}.up.lora_a", (16, 8), ((0,), ()), (16, 64)),
            VariableSpec(f"{block}.key.kernel", (16, 6), "float32"),
        ]
    variables += [
        derived("packed.kernel", "packed.kernel", (8, 2), ((0,), (1,)), (8, 4), "int8"),
        VariableSpec("flat", (64,), "float32"),
        VariableSpec("odd", (16, 6), "float32"),
        VariableSpec("norm.scale", (16,), "float32"),
        VariableSpec("norm.moving_mean", (16,), "float32", Kind.STATE),
        VariableSpec("drop.seed", (2,), "uint32", Kind.RNG),
        VariableSpec("optimizer.tokens.m", (32, 16), "float32", Kind.SLOT, parent="tokens"),
        derived("tokens", "optimizer.tokens.r", (32,), ((0,),), (32, 16), kind=Kind.SLOT),
        VariableSpec("optimizer.tokens.s", (3,), "float32", Kind.SLOT, parent="tokens"),
        VariableSpec("optimizer.iterations", (), "int32", Kind.SLOT),
        VariableSpec("loss.total", (), "float32", Kind.METRIC),
    ]
    layout_map = lm.LayoutMap(MESH, {"head": ("model", None), "tokens": (None, "model")})
    layout_map[r".*\.up\.kernel"] = ("batch", "model")
    layout_map.add(r".*\.key\.kernel", (None, "model"), uneven="replicate")
    layout_map[r".*lora_a$"] = layout_map["packed"] = (None, "model")
    layout_map[r"blocks\.0\.up\.kernel$"] = (None, None)
    layout_map["flat"] = layout_map["odd"] = (None, "model")
    layout_map["norms"] = (None,)
    layout_map.activations.update(
        {r"blocks\.\d+$": ("batch", None), "blocks.*": (None, None), "blokcs": (None,)}
    )
    whole = {("", "odd"): "it is orthogonal"}
    return make_plan(variables, layout_map, global_init=whole, layers=["blocks.0", "blocks.1", "head"])


PLAN = r"""
Verdict: cannot be built: 2 errors; 5.3 KiB per device so far, before activations; 8 warnings

variable                  times  shape    dtype     layout              shard           bytes  per device  rule
------------------------  -----  -------  --------  ------------------  ------------  -------  ----------  ---------
tokens                           32 x 16  bfloat16  (model, unsharded)  8 x 16        1.0 KiB       256 B  1
blocks.{0..1}.up.kernel       2  16 x 64  float32   (batch, model)      8 x 16        8.0 KiB     1.0 KiB  3
blocks.{0..1}.up.lora_a       2  16 x 8   float32   (unsharded, model)  16 x 2        1.0 KiB       256 B  5
blocks.{0..1}.key.kernel      2  16 x 6   float32   replicated          16 x 6          768 B       768 B  4
packed.kernel                    8 x 2    int8      replicated          8 x 2            16 B        16 B  6
flat                             64       float32   (unsharded, model)  does not fit    256 B              8
odd                              16 x 6   float32   (unsharded, model)  does not fit    384 B              9
norm.scale                       16       float32   replicated          16               64 B        64 B  no rule
norm.moving_mean                 16       float32   replicated          16               64 B        64 B  no rule
drop.seed                        2        uint32    replicated          2                 8 B         8 B  (rng)
optimizer.*.m                             float32   as its weight                     2.0 KiB       512 B  (slot)
optimizer.tokens.r               32       float32   (model,)            8               128 B        32 B  as tokens
optimizer.tokens.s               3        float32   replicated          3                12 B        12 B  (slot)
optimizer.iterations             scalar   int32     replicated          scalar            4 B         4 B  (slot)
loss.total                       scalar   float32   replicated          scalar            4 B         4 B  (metric)

rule 1  head
rule 3  .*\.up\.kernel
rule 4  .*\.key\.kernel
rule 5  .*lora_a$
rule 6  packed
rule 8  flat
rule 9  odd

layer's output  times  layout              rule
--------------  -----  ------------------  ----
blocks.{0..1}       2  (batch, unsharded)  1

Plan: 18 variables on batch=2, model=4, 13.7 KiB, 2.9 KiB per device; 2 errors, 8 warnings
largest variable initialized on one device: odd, 384 B

error: flat: a layout of rank 2 does not fit a tensor of rank 1
  shape   (64,)
  layout  (unsharded, model)     rule 8  flat
  mesh    batch=2, model=4
  why     a layout has one sharding spec for each axis
  fix     change rule 8 to (None,)

error: odd: axis 1 cannot be split evenly
  shape   (16, 6)
  layout  (unsharded, model)     rule 9  odd
  mesh    batch=2, model=4
  why     6 is not a multiple of 4
  fix     set uneven="pad", which costs 32 B per device, or uneven="shrink"

warning: tokens: its paths get different layouts
  tokens  (unsharded, model)  rule 2  tokens
  head    (model, unsharded)  rule 1  head
  why     it is one variable with 2 paths, and rule 1  head comes first
  fix     make the rules agree, or leave out one of them

warning: rule 2  tokens: never used, since earlier rules match all its variables
  first lost  tokens to rule 1  head
  why         the first rule that matches wins
  fix         put it before rule 1, or delete it

warning: rule 7  blocks\.0\.up\.kernel$: never used, since earlier rules match all its variables
  first lost  blocks.0.up.kernel to rule 3  .*\.up\.kernel
  why         the first rule that matches wins
  fix         put it before rule 3, or delete it

warning: rule 10  norms: matches no variable
  near misses  norm.scale, norm.moving_mean
  why          rules match from the start of a path, and none of the model's 14 paths matches this pattern
  fix          did you mean r"norm"? else delete it

warning: activation rule 2  blocks.*: never used, since earlier rules match all its layers
  first lost  blocks.0 to rule 1  blocks\.\d+$
  why         the first rule that matches wins
  fix         put it before rule 1, or delete it

warning: activation rule 3  blokcs: matches no layer
  near misses  blocks.0
  why          rules match from the start of a path, and none of the model's 3 paths matches this pattern
  fix          delete it, because rule 1 matches blocks.0

warning: no rule matches these 2, so they are replicated; add rules, or set layout_map.rest = "replicated"
  norm.scale        add a rule: layout_map[r"norm\.scale$"] = (None,)
  norm.moving_mean  add a rule: layout_map[r"norm\.moving_mean$"] = (None,)

note: blocks.{0..1}.key.kernel: axis 1 cannot be split evenly, so it is replicated
note: packed.kernel: axis 1 cannot be split evenly, so it is replicated

Lint: 6 findings beside 2 errors of the plan; batches are assumed to be sharded over batch; to see them: plan.lint()
""".strip()

MEMORY = r"""
per device: weights 2.3 KiB, gradients 2.3 KiB, slots 560 B, state 76 B; 5.3 KiB in total

replicated                saves  if sharded
------------------------  -----  -----------------
blocks.{0..1}.key.kernel  576 B  axis 0 over model
packed.kernel              12 B  axis 0 over model
""".strip()

# What is replicated without a rule is one problem in a plan, and each by itself in an error.
STRICT = [
    "10 problems",
    *(part.partition(": ")[2] for part in PLAN.split("\n\n") if part.startswith(("error: ", "warning: "))),
]
STRICT[0] += f"\n{STRICT.pop(1)}"
STRICT[-1:] = r"""
norm.scale: no rule matches, so it is replicated
  shape  (16,)
  why    every device holds all 64 bytes of it
  fix    add a rule: layout_map[r"norm\.scale$"] = (None,)

norm.moving_mean: no rule matches, so it is replicated
  shape  (16,)
  why    every device holds all 64 bytes of it
  fix    add a rule: layout_map[r"norm\.moving_mean$"] = (None,)

some variables match no rule: set layout_map.rest = "replicated" if that is meant""".strip().split("\n\n")

EXPLAINED = {
    "blocks.1.up.kernel": r"""
blocks.1.up.kernel
  what        weight, float32[16, 64], 4.0 KiB
  layout      (batch, model)
  per device  8 x 16, 512 B
  because     rule 3  .*\.up\.kernel
  change it   change rule 3, or add a rule before it: the first rule that matches wins
""",
    "blocks.1.up.lora_a": r"""
blocks.1.up.lora_a
  what        weight, float32[16, 8], 512 B
  layout      (unsharded, model)
  per device  16 x 2, 128 B
  because     rule 5  .*lora_a$, which is meant for it and not for its parent blocks.1.up.kernel
  change it   change rule 5, or add a rule before it: the first rule that matches wins
""",
    "blocks.0.key.kernel": r"""
blocks.0.key.kernel
  what        weight, float32[16, 6], 384 B
  layout      replicated
  per device  16 x 6, 384 B
  because     rule 4  .*\.key\.kernel
  note        blocks.0.key.kernel: axis 1 cannot be split evenly, so it is replicated
                shape   (16, 6)
                layout  (unsharded, model)     rule 4  .*\.key\.kernel
                mesh    batch=2, model=4
                why     6 is not a multiple of 4, and rule 4 has uneven="replicate"
  change it   change rule 4, or add a rule before it: the first rule that matches wins
""",
    "packed.kernel": r"""
packed.kernel
  what        weight, int8[8, 2], 16 B
  layout      replicated
  per device  8 x 2, 16 B
  because     rule 6  packed
  its axes    0 of axis 0, 1 of axis 1
  note        packed.kernel: axis 1 cannot be split evenly, so it is replicated
                shape   (8, 2)
                layout  (unsharded, model)     rule 6  packed
                mesh    batch=2, model=4
                why     2 is not a multiple of 4, and it is sharded as its rule shards the weight that it replaces, as far as that divides it
  change it   change rule 6, or add a rule before it: the first rule that matches wins
""",  # noqa: E501
    "head": r"""
tokens
  also called   head
  what          weight, bfloat16[32, 16], 1.0 KiB
  layout        (model, unsharded)
  per device    8 x 16, 256 B
  because       rule 1  head
  also matches  rule 2  tokens: would give (unsharded, model)
  warning       tokens: its paths get different layouts
                  tokens  (unsharded, model)  rule 2  tokens
                  head    (model, unsharded)  rule 1  head
                  why     it is one variable with 2 paths, and rule 1  head comes first
                  fix     make the rules agree, or leave out one of them
  warning       rule 2  tokens: never used, since earlier rules match all its variables
                  first lost  tokens to rule 1  head
                  why         the first rule that matches wins
                  fix         put it before rule 1, or delete it
  change it     change rule 1: a rule that equals the path wins over all others
""",
    "flat": r"""
flat
  what        weight, float32[64], 256 B
  layout      (unsharded, model)
  per device  does not fit
  because     rule 8  flat
  error       flat: a layout of rank 2 does not fit a tensor of rank 1
                shape   (64,)
                layout  (unsharded, model)     rule 8  flat
                mesh    batch=2, model=4
                why     a layout has one sharding spec for each axis
                fix     change rule 8 to (None,)
  change it   change rule 8: a rule that equals the path wins over all others
""",
    "odd": r"""
odd
  what         weight, float32[16, 6], 384 B
  layout       (unsharded, model)
  per device   does not fit
  global init  it is orthogonal
  because      rule 9  odd
  error        odd: axis 1 cannot be split evenly
                 shape   (16, 6)
                 layout  (unsharded, model)     rule 9  odd
                 mesh    batch=2, model=4
                 why     6 is not a multiple of 4
                 fix     set uneven="pad", which costs 32 B per device, or uneven="shrink"
  change it    change rule 9: a rule that equals the path wins over all others
""",
    "norm.moving_mean": r"""
norm.moving_mean
  what        state, float32[16], 64 B
  layout      replicated
  per device  16, 64 B
  because     no rule matches, so it is replicated
  change it   layout_map[r"norm\.moving_mean$"] = (None,), with mesh dims where it is to be sharded
""",
    "drop.seed": r"""
drop.seed
  what        rng, uint32[2], 8 B
  layout      replicated
  per device  2, 8 B
  because     no rule matches, so it is replicated
  change it   layout_map[r"drop\.seed$"] = (None,), with mesh dims where it is to be sharded
""",
    "optimizer.tokens.r": r"""
optimizer.tokens.r
  what        slot, float32[32], 128 B
  layout      (model,)
  per device  8, 32 B
  because     it follows its parent: tokens
  its axes    0 of axis 0
  change it   with the rule of tokens
""",
    "optimizer.tokens.s": r"""
optimizer.tokens.s
  what        slot, float32[3], 12 B
  layout      replicated
  per device  3, 12 B
  because     it belongs to tokens, and is replicated
  change it   with the rule of tokens
""",
    "optimizer.iterations": r"""
optimizer.iterations
  what        slot, int32[], 4 B
  layout      replicated
  per device  scalar, 4 B
  because     rules do not apply to a slot; it is replicated
""",
    "loss.total": r"""
loss.total
  what        metric, float32[], 4 B
  layout      replicated
  per device  scalar, 4 B
  because     rules do not apply to a metric; it is replicated
""",
}


def another():
    """The same model on a mesh of another shape, with other rules, one block more, and one variable less."""
    before = one_of_each()
    layout_map = lm.LayoutMap(lm.Mesh(None, "batch=4,model=2"), {r".*\.up\.kernel": ("model", "batch")})
    kept = [a.variable for a in before.assignments if a.variable.path != "flat"]
    return make_plan([*kept, VariableSpec("blocks.2.up.kernel", (16, 64), "bfloat16")], layout_map)


def rules():
    layout_map = lm.LayoutMap(MESH, {r"<b>&.*": (None, "model")}, {r"blocks\.\d+": ("batch", None)})
    layout_map.add("up", (("batch", "model"), None), uneven="shrink")
    return layout_map


DIFF = r"""
the mesh                 mesh     batch=2, model=4 -> batch=4, model=2
tokens                   layout   (model, unsharded) -> (unsharded, unsharded)
blocks.{0..1}.up.kernel  layout   (batch, model) -> (model, batch)
blocks.{0..1}.up.lora_a  layout   (unsharded, model) -> (model, unsharded)
flat                     removed  float32[64] (unsharded, model)
odd                      layout   (unsharded, model) -> (unsharded, unsharded)
optimizer.*.m            layout   as its weight: (model, unsharded) -> (unsharded, unsharded)
optimizer.tokens.r       layout   (model,) -> (unsharded,)
blocks.2.up.kernel       added    bfloat16[16, 64] (model, batch)
blocks.{0..1}            output   (batch, unsharded)

13 changes; per device 2.9 KiB -> 6.2 KiB
""".strip()


NOTEBOOK = {
    "plan": one_of_each,
    "map": rules,
    "diff": lambda: one_of_each().diff(another()),
}


def test_a_plan():
    """Rows, totals, errors, warnings, notes: each once, in this order."""
    assert PLAN.strip() == str(one_of_each())
    assert (
        "<Plan: 18 variables on batch=2, model=4, 13.7 KiB, 2.9 KiB per device; 2 errors, 8 warnings>"
        == repr(one_of_each())
    )


def test_the_memory_of_a_plan():
    """What a device holds, and what could be less; what does not fit is not counted."""
    assert MEMORY == str(one_of_each().memory)
    assert f"<Memory: {MEMORY.splitlines()[0]}>" == repr(one_of_each().memory)


def test_the_memory_of_a_large_plan():
    """The ten that would save most are shown, and the rest counted; of nothing there is nothing."""
    variables = [VariableSpec(f"d{chr(97 + n)}", (8 * (n + 1), 1), "float32") for n in range(12)]
    said = str(make_plan(variables, lm.LayoutMap(MESH)).memory).splitlines()

    assert ["dl", "and"] == [line.split()[0] for line in (said[4], said[-1].removeprefix("... "))]
    assert (15, "... and 2 more") == (len(said), said[-1])
    assert "per device: nothing; 0 B in total" == str(make_plan([], lm.LayoutMap(MESH)).memory)


def test_strict_raises_once_with_everything():
    """Every error and every warning, of variables, rules and layers' rules, in one message; notes are none."""
    plan = one_of_each()
    with pytest.raises(lm.PlanError) as caught:
        plan.check(strict=True)

    assert STRICT == str(caught.value).split("\n\n")
    assert plan.errors + plan.warnings == caught.value.problems
    assert {
        *("rank", "uneven", "tied", "no rule", "shadowed rule", "unused rule"),
    } == {problem.kind for problem in caught.value.problems}
    assert {"uneven", "global init"} == {p.kind for p in plan.problems if p.severity == "note"}


@pytest.mark.parametrize("path", EXPLAINED)
def test_why_a_variable_is_where_it_is(path):
    """Each reason that there is: a rule, one that is meant for it, a parent, none; what was taken; what is wrong."""
    assert EXPLAINED[path].strip() == one_of_each().explain(path)


def test_a_path_that_no_variable_has():
    """Those that come close are named, for a path and for another path to it."""
    for wrong, near in (
        ("blocks.1.up.kernal", "blocks.1.up.kernel, blocks.1.key.kernel, blocks.1.up.lora_a"),
        ("hed", "head"),
        ("zzz", ""),
    ):
        with pytest.raises(KeyError) as caught:
            one_of_each().explain(wrong)
        told = f"; near misses: {near}" if near else ""
        assert f"the plan has no variable '{wrong}'{told}" == caught.value.args[0]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "blocks.3.up.kernel",
            r"""
blocks.3.up.kernel: rule 1  .*\.kernel -> (unsharded, model)
  also matches  rule 3  blocks.*: would give (batch,)  uneven="shrink"
  change it     change rule 1, or add a rule before it: the first rule that matches wins
""",
        ),
        (
            "blocks.3.up.gate",
            r"""
blocks.3.up.gate: rule 3  blocks.* -> (batch,)  uneven="shrink"
  change it  change rule 3, or add a rule before it: the first rule that matches wins
""",
        ),
        (
            "d1",
            r"""
d1: rule 2  d1 -> (unsharded,)
  change it  change rule 2: a rule that equals the path wins over all others
""",
        ),
        (
            "block.3.up.kernal",
            r"""
block.3.up.kernal: no rule matches, so it is replicated
  near miss  .*\.kernel
""",
        ),
        ("seed", "seed: no rule matches, so it is replicated"),
    ],
)
def test_what_a_map_says_of_a_path(path, said):
    """What won, what also matches and would give, what came near, and what to do."""
    layout_map = lm.LayoutMap(MESH, {r".*\.kernel": (None, "model"), "d1": (None,)})
    layout_map.add("blocks.*", ("batch",), uneven="shrink")

    assert said.strip() == str(layout_map.match(path))


def test_what_activations_say_of_a_path():
    """A layer's output is not replicated where no rule matches."""
    activations = lm.LayoutMap(MESH, activations={r"blocks\.\d+": ("batch", None)}).activations

    assert (
        r"""
block.1: no rule matches, so its output stays as it is
  near miss  blocks\.\d+
""".strip()
        == str(activations.match("block.1"))
    )
    assert (
        r"""
<Activations on batch=2, model=4, 1 rule
   1  blocks\.\d+  (batch, unsharded)>
""".strip()
        == repr(activations)
    )


@pytest.mark.parametrize("view", NOTEBOOK)
def test_in_a_notebook(view):
    """The HTML is what it was, to the letter."""
    assert (GOLDEN / f"{view}.html").read_text(encoding="utf-8") == NOTEBOOK[view]()._repr_html_() + "\n"


def test_a_difference():
    """The mesh, what went, what moved, what came, and what that does to a device."""
    assert DIFF == str(one_of_each().diff(another()))
    assert "<PlanDiff: 13 changes; per device 2.9 KiB -> 6.2 KiB>" == repr(one_of_each().diff(another()))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, make in NOTEBOOK.items():
        (GOLDEN / f"{name}.html").write_text(make()._repr_html_() + "\n", encoding="utf-8")
