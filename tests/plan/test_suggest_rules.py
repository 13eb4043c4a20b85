"""Suggested rules shard each weight by its role, and a plan with them has no problems."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from cases import EVERYTHING
from decoders import MESHES, make_dense, make_weight, models
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutmap import LayoutMap, Mesh
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.plan.suggest_rules import suggest_rules
from layoutmap.scope.plan import make_plan


def suggest(variables, mesh="batch=2,model=4", batch_dim=None):
    return suggest_rules(make_plan(variables, LayoutMap(mesh)), batch_dim)


def make_blocks(wide=(256, 256, 256), rows=512):
    found = [make_weight("tokens.embeddings", (rows, 64), "rows", "out.0")]
    for number, size in enumerate(wide):
        at = f"blocks.{number}"
        for part in ("query", "key", "value"):
            found += make_dense(f"{at}.attention.{part}", (64, 128), 16)
        found += make_dense(f"{at}.attention.output", (128, 64), 16)
        found += [*make_dense(f"{at}.up", (64, size)), *make_dense(f"{at}.down", (size, 64))]
        found.append(make_weight(f"{at}.norm.scale", (64,)))
    return found


def test_each_role_and_group_of_blocks_has_one_rule_with_its_reason():
    """Norms, the biases of row kernels, and small tables and arrays have none: the rest is replicated."""
    small = [make_weight("bins", (32, 4), "rows", "out.0"), make_weight("where", (1, 16, 32))]
    rules = suggest([*make_blocks(), *small])
    assert {
        r"tokens\.embeddings$": (
            "table: each device along model has some of the 512 rows",
            "model",
            None,
        ),
        r"blocks\.\d+\.attention\.(query|key|value)\.kernel$": (
            "heads: each device computes whole heads",
            None,
            "model",
        ),
        r"blocks\.\d+\.attention\.(query|key|value)\.bias$": (
            "bias: sharded as the output of its kernel",
            "model",
        ),
        r"blocks\.\d+\.attention\.output\.kernel$": (
            "row: takes the sharded outputs of query, key, value, and the sums are all-reduced over model",
            "model",
            None,
        ),
        r"blocks\.\d+\.up\.kernel$": (
            "column: outputs are sharded, as the inputs of down are",
            None,
            "model",
        ),
        r"blocks\.\d+\.up\.bias$": ("bias: sharded as the output of its kernel", "model"),
        r"blocks\.\d+\.down\.kernel$": (
            "row: takes the sharded outputs of up, and the sums are all-reduced over model",
            "model",
            None,
        ),
    } == {
        rule.pattern: (rule.reason, *(None if s == "unsharded" else s for s in rule.layout.sharding_specs))
        for rule in rules.rules
    }
    assert "replicated" == rules.rest
    whole = make_plan([*make_blocks(), *small], LayoutMap("batch=2,model=4", rest="replicated"))
    assert {"bins", "where"}.isdisjoint(row.path for row in whole.memory.rows)


@pytest.mark.parametrize(
    ("shapes", "by_last_axis", "by_first_axis"),
    [
        ({"down": (64, 16), "up": (16, 64)}, ["up"], ["down"]),
        ({"w1": (64, 256), "w2": (256, 64), "w3": (64, 256)}, ["w1", "w3"], ["w2"]),
        ({"down": (64, 64), "gate": (64, 64), "up": (64, 64)}, ["gate", "up"], ["down"]),
        ({"gate_up": (64, 512), "out": (256, 64)}, ["gate_up"], ["out"]),
        ({"w_in": (256, 64), "w_out": (64, 256), "norm": (64,)}, ["w_out"], ["w_in"]),  # (outputs, inputs)
        ({"expand": (64, 256), "shrink": (256, 64), "norm": (64,)}, ["expand"], ["shrink"]),
        ({"after": (256, 64), "before": (64, 256), "norm": (64,)}, ["before"], ["after"]),
        (
            {f"w{name}": (64, 64 if name in "qo12" else 32) for name in "12koqv"},
            ["wq", "wk", "wv", "w1"],
            ["wo", "w2"],
        ),
        ({"0.weight": (64, 16), "1.weight": (12, 64)}, ["1.weight"], ["0.weight"]),
        ({"0.0": (16, 64), "0.1": (64,), "1.0": (64, 64), "2.0": (64, 16)}, ["0.0", "2.0"], ["1.0"]),
        ({"qkv": (64, 96), "proj": (64, 64)}, ["qkv"], ["proj"]),
        # The outputs of a `kernel` are its last axis, though 16 is the wider and rarer size.
        (
            {"up.kernel": (16, 8), "down.kernel": (8, 16), "norm": (8,), "shift": (8,)},
            ["up.kernel"],
            ["down.kernel"],
        ),
        ({"wte": (512, 64), "head": (64, 512), "wpe": (128, 64)}, ["head"], ["wte", "wpe"]),
    ],
)
def test_roles_of_plain_arrays_follow_from_names_and_shapes(shapes, by_last_axis, by_first_axis):
    """Two kernels are sharded along the axis between them. Lint checks such arrays, too."""
    variables = [make_weight(f"layers.{n}.{name}", shape) for n in range(2) for name, shape in shapes.items()]
    rules = suggest(variables)
    plan = make_plan(variables, rules)

    for names, specs in ((by_last_axis, ("unsharded", "model")), (by_first_axis, ("model", "unsharded"))):
        assert dict.fromkeys(names, specs) == {
            name: plan[f"layers.1.{name}"].layout.sharding_specs for name in names
        }
    assert not [rule.reason for rule in rules.rules if "unknown" in rule.reason]
    assert () == (*plan.problems, *plan.lint())
    assert "Lint: nothing found; batches are assumed to be sharded over batch" == str(plan.lint())


def test_lint_counts_the_sharded_weights_that_it_cannot_check():
    """Their roles are unknown. A swapped gate of known names is a finding."""
    variables = [
        make_weight(name, shape) for name, shape in (("a", (64, 32)), ("b", (16, 64)), ("c", (8, 4)))
    ]
    plan = make_plan(variables, LayoutMap("model=4", {"a|b": ("model", None)}, rest="replicated"))
    gated = [make_weight(name, (64, 256)[:: -1 if name == "w2" else 1]) for name in ("w1", "w2", "w3")]
    layouts = {"w1": (None, "model"), "w": ("model", None)}

    assert plan.lint().summary == (
        "nothing found; 2 sharded weights of unknown use not checked: a, b; the batch dim is not known"
    )
    many = [make_weight(f"h.{n}.{name}", (16, 8)) for n in range(2) for name in "abcde"]
    plan = make_plan(many, LayoutMap("model=4", {".*": ("model", None)}))
    assert (
        "10 sharded weights of unknown use not checked: h.{0..1}.a, h.{0..1}.b, h.{0..1}.c and 2 more;"
        in (plan.lint().summary)
    )
    assert [("swapped", "w3")] == [
        (problem.kind, problem.subject)
        for problem in make_plan(gated, LayoutMap("batch=2,model=4", layouts)).lint()
    ]


def test_arrays_of_a_pytree_with_one_block_in_a_list_have_no_false_roles():
    """A table and an output layer beside the block are no pair, and each bias is sharded like its kernel."""
    shapes = {f"enc.0.sa.w{part}": (32, 4, 8) for part in "qkv"}
    shapes |= {"enc.0.sa.wo": (4, 8, 32), "enc.0.sa.bq": (4, 8), "lookup": (2048, 32), "unproj": (32, 2048)}
    shapes |= {f"enc.0.ffn.{name}": (32, 64) for name in "gu"}
    shapes |= {"enc.0.ffn.d": (64, 32), "enc.0.ffn.d_b": (32,)}
    variables = [make_weight(*each) for each in shapes.items()]

    plan = make_plan(variables, suggest(variables))

    assert "bias: sharded as the output of its kernel" == plan["enc.0.sa.bq"].match.rule.reason
    starts = {
        "enc.0.ffn.g": "column",
        "enc.0.ffn.u": "column",
        "enc.0.ffn.d": "row: takes the sharded outputs of g, u",
    }
    starts |= dict.fromkeys(("lookup", "unproj"), "unknown role")
    reasons = {path: plan[path].match.rule.reason for path in starts}
    assert starts == {path: reasons[path][: len(start)] for path, start in starts.items()}
    assert not plan.lint()


def test_stacked_layers_are_no_experts():
    """Their norm has an axis of the layers and one of the features, as a router has of experts and features."""
    layers = {"w1": (4, 64, 256), "w2": (4, 256, 64), "norm": (4, 64)}
    rules = suggest([make_weight(f"layers.{name}", shape) for name, shape in layers.items()])

    assert not any(word in rule.reason for rule in rules.rules for word in ("expert", "router"))


def test_one_stack_is_no_bank_of_experts():
    """Kernels of its sizes are no routers, and neither is a bias with an axis of heads beside two stacks."""
    stacks = [make_weight(name, (4, 4, 32)) for name in ("one", "two")]
    heads = [
        make_weight("heads.kernel", (32, 4, 4), "in.0", "out.0", "out.1"),
        make_weight("heads.bias", (4, 4), "out.0", "out.1"),
    ]
    alone = suggest([stacks[0], *make_dense("last", (32, 4))])
    together = suggest([*stacks, *heads])

    assert not any(word in rule.reason for rule in alone.rules for word in ("expert", "router"))
    assert r"heads\.bias$" in together


@pytest.mark.parametrize("shape", [(64, 8), (8, 64)])
def test_a_router_of_unknown_use_is_replicated(shape):
    """Its axes are the features and the experts, and its name shows that they are in the other order."""
    experts = [make_weight(f"mlp.experts.{name}", (8, 64, 128)) for name in ("gate_up", "down")]
    rules = suggest([make_weight("mlp.gate.weight", shape), *experts])

    assert {
        r"mlp\.gate\.weight$": "router: replicated, because each device scores all experts",
        r"mlp\.experts\.(gate_up|down)$": "experts: each device has 2 of 8 experts",
    } == {rule.pattern: rule.reason for rule in rules.rules}


def test_stacked_experts_are_sharded_and_their_router_is_replicated():
    """They have an axis of the size of the router's output."""
    router = make_weight("blocks.0.moe.router.kernel", (64, 8), "in.0", "out.0")
    up, down = (
        make_weight(f"blocks.0.moe.w_{n}", (8, *s)) for n, s in (("in", (64, 256)), ("out", (256, 64)))
    )
    rules = suggest([router, up, down], "batch=2,expert=4")

    assert {
        r"blocks\.0\.moe\.w_(in|out)$": ("experts: each device has 2 of 8 experts", ("expert", None, None)),
        r"blocks\.0\.moe\.router\.kernel$": (
            "router: replicated, because each device scores all experts",
            (None, None),
        ),
    } == {
        r.pattern: (r.reason, tuple(None if s == "unsharded" else s for s in r.layout.sharding_specs))
        for r in rules.rules
    }
    plan = make_plan([router, up, down], rules)
    assert () == (*plan.problems, *plan.lint(), *plan.memory.rows)


@pytest.mark.parametrize("name", ["expert", "experts"])
def test_the_dim_of_the_experts_shards_them_and_no_other_weights(name):
    """Also if it is not the largest one, which shards the other kernels."""
    experts = [make_weight(f"moe.experts.{each}", (8, 64, 64)) for each in ("up", "down")]
    others = [
        *make_dense("up", (64, 256)),
        *make_dense("down", (256, 64)),
        make_weight("moe.router", (64, 8)),
    ]
    for mesh in (f"batch=2,model=4,{name}=2", f"batch=2,{name}=4,model=2"):
        rules = suggest([*others, *experts], mesh).rules
        dims = {rule.pattern: {*rule.layout.sharding_specs} - {"unsharded"} for rule in rules}

        assert {name} == dims.pop(r"moe\.experts\.(up|down)$")
        assert {"model"} == {each for specs in dims.values() for each in specs}


@pytest.mark.parametrize("router", ["router", "gate"])
def test_a_list_of_experts_is_not_sharded_by_experts_and_the_reason_says_it(router):
    """Each device needs the whole router. A dim of the experts that nothing uses is named."""
    sizes = {
        f"moe.experts.{n}.{name}": s for n in range(4) for name, s in (("0", (64, 128)), ("2", (128, 64)))
    }
    variables = [
        w for path, shape in (sizes | {f"moe.{router}": (64, 4)}).items() for w in make_dense(path, shape)
    ]
    advice = "; a list of experts cannot be divided over expert{}: stack them"
    for mesh, dim, unused in (
        ("batch=2,expert=4", "expert", ""),
        ("batch=2,expert=2,model=2", "model", ", so nothing uses it"),
        ("batch=2,model=4", "model", None),
    ):
        plan = make_plan(variables, suggest(variables, mesh))
        first, second, of_router = (
            plan[f"moe.{name}.kernel"] for name in ("experts.1.0", "experts.1.2", router)
        )
        assert (("unsharded", dim), (dim, "unsharded")) == tuple(
            a.layout.sharding_specs for a in (first, second)
        )
        assert "router: replicated, because each device scores all experts" == of_router.match.rule.reason
        assert plan[f"moe.{router}.bias"].layout.is_fully_replicated()
        assert all(
            (unused is not None and a.match.rule.reason.endswith(advice.format(unused)))
            or (unused is None and "stack them" not in a.match.rule.reason)
            for a in (first, second)
        )
        assert ["unused dim"] * bool(unused) == [p.kind for p in (*plan.problems, *plan.lint())]


def test_an_odd_block_has_rules_of_its_own():
    """They are the first, since the rules of the other blocks match it, too."""
    plan = make_plan(make_blocks((256, 254, 256, 256)), suggest(make_blocks((256, 254, 256, 256))))
    odd = [rule for rule in suggest(make_blocks((256, 254, 256, 256))).rules if "1" in rule.pattern]

    assert [(1, r"blocks\.1\.(up|down)\.kernel$"), (2, r"blocks\.1\.(up|down)\.bias$")] == [
        (rule.number, rule.pattern) for rule in odd
    ]
    assert () == (*plan.problems, *plan.lint())


def make_chain(*sizes):
    return [w for n, pair in enumerate(itertools.pairwise(sizes)) for w in make_dense(f"dense_{n}", pair)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            (64, 256, 64, 256, 64, 128),
            {
                r"dense_(1|3)\.kernel$": "row: takes the sharded outputs of the layer before, and the sums are "
                r"all-reduced over model; must stay before dense_\d+\.kernel$, as the first match wins",
                r"dense_\d+\.kernel$": "column: outputs are sharded, as the inputs of the next layer are; for "
                "dense_4.kernel: column: outputs are sharded, and gathered if what follows needs all of them",
            },
        ),
        # The head of 10 classes has no output axis that model=4 divides.
        (
            (64, 256, 64, 10),
            {
                r"dense_0\.kernel$": "column: outputs are sharded, as the inputs of dense_1 are; "
                r"must stay before dense_\d+\.kernel$, as the first match wins",
                r"dense_\d+\.kernel$": "row: takes the sharded outputs of the layer before, and the sums are "
                "all-reduced over model; for dense_2.kernel: row: each device takes its part of the inputs, "
                "and the sums are all-reduced over model",
            },
        ),
    ],
)
def test_a_rule_of_several_layers_has_a_reason_for_each(sizes, expected):
    """A head with the layout of other layers has another role, and a rule says which one it must precede."""
    rules = suggest(make_chain(*sizes)).rules

    assert expected == {rule.pattern: rule.reason for rule in rules if "kernel" in rule.pattern}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        # A table and its output layer, and not the two kernels of a block: repeated blocks have the same width.
        (
            {f"m{n}.{name}": (96, 96) for n in range(2) for name in "kq"}
            | {"t1": (512, 96), "t2": (96, 512)},
            {"t1": (0, "unknown"), "t2": (1, "unknown")},
        ),
        ({"tok": (512, 96), "unembed": (96, 512)}, {"tok": (0, "table"), "unembed": (1, "column")}),
        ({"lut": (512, 96), "unembed": (96, 512)}, {"lut": (0, "unknown"), "unembed": (1, "column")}),
        ({"emb": (512, 96), "out": (96, 512), "a.z": (8, 4)}, {"emb": (0, "table"), "out": (1, "column")}),
        # Of two arrays with names of tables, the one with as many columns as the other has rows is the head.
        *(
            ({"tok": (512, 96), name: (96, 512)} | {"w1": (96, 256), "w2": (256, 96)}, {name: (1, "column")})
            for name in ("to_vocab", "output_embedding")
        ),
        ({"emb_table": (512, 96), "out": (96, 512), "a.z": (8, 4)}, {"emb_table": (0, "table")}),
        (
            {"words": (96, 32), "unrelated": (32, 96), "w1": (32, 128), "w2": (128, 32)},
            {"words": (0, "unknown"), "unrelated": (1, "unknown"), "w2": (0, "row")},
        ),
        ({"fc": (4, 64, 256), "fc2": (4, 256, 64)}, {"fc": (2, "unknown"), "fc2": (1, "unknown")}),
    ],
)
def test_arrays_whose_names_mean_nothing_are_unknown(shapes, expected):
    """Their largest axis is sharded, as that of a table, of an output layer, and of the kernels of stacked layers."""
    variables = [make_weight(path, shape) for path, shape in shapes.items()]
    rules = suggest(variables)
    plan = make_plan(variables, rules)
    found = {path: plan[path] for path in expected}

    assert expected == {
        path: (a.layout.sharding_specs.index("model"), a.match.rule.reason.split()[0].strip(":"))
        for path, a in found.items()
    }
    assert () == (*plan.problems, *plan.lint())


def test_an_odd_tied_weight_has_its_rule_under_all_paths():
    """The rule of the others matches a path of the tied weight, so that weight's own rule matches it first."""
    tied = replace(make_weight("net.l2.weight", (30, 16)), aliases=("net.l5.weight",))
    variables = [tied, *(make_weight(f"net.l{n}.weight", (16, 16)) for n in (3, 4, 6))]
    rules = suggest(variables)

    assert [r"net\.l(2|5)\.weight$", r"net\.l\d+\.weight$"] == [rule.pattern for rule in rules.rules]
    assert () == make_plan(variables, rules).problems


@pytest.mark.parametrize(
    ("variables", "pattern", "reason"),
    [
        (
            make_blocks(rows=509),
            "tokens",
            "table: sharded by features: model=16 does not divide axis 0 of 509",
        ),
        (
            [*make_dense("head", (64, 256))],
            "kernel",
            "column: outputs are sharded, and gathered if what follows needs all of them",
        ),
        (make_blocks(), "query", "replicated: model=16 does not divide 8 heads"),
        (make_blocks((250,)), "up", "replicated: model=16 does not divide axis 1 of 250"),
        (
            [make_weight(f"w{part}", (64, 64)) for part in "qkvo"],
            "q",
            "heads: each device computes whole heads, if 16 divides their number",
        ),
        ([make_weight("bank.experts", (16, 8, 8))], "bank", "experts: each device has 1 of 16 experts"),
        (
            [make_weight("other", (16, 8))],
            "other",
            "unknown role: axis 0 is sharded because it is the largest that divides evenly",
        ),
    ],
)
def test_the_reason_states_what_does_not_divide(variables, pattern, reason):
    """A weight that no mesh dim divides is replicated, and a table is sharded along its other axis."""
    assert [reason] == [r.reason for r in suggest(variables, "model=16").rules if pattern in r.pattern][:1]


def test_indices_and_masks_need_no_rule():
    """Each device needs them whole. A buffer of floating point has a rule, and so do packed weights."""
    variables = [
        VariableSpec(f"{dtype}_buffer", (16, 8), dtype, kind=Kind.STATE)
        for dtype in ("int64", "bool", "float32", "int32", "uint8")
    ]
    rules = suggest(variables)
    with_rule = [v.dtype for v in variables if any(re.match(rule.pattern, v.path) for rule in rules.rules)]
    assert ["float32", "int32", "uint8"] == with_rule


def test_weights_are_sharded_over_the_batch_dim_of_a_mesh_without_another():
    """Each is stored in shards and gathered for use."""
    rules = suggest(make_blocks(), "data=8").rules
    assert {"FSDP: stored in shards over data, the batch's dim, and gathered for use"} == {
        r.reason for r in rules
    }


def test_a_table_is_not_sharded_over_the_batch_dim_if_a_compiler_places_its_outputs():
    """Lint would report it: each step gathers or sums the outputs of the table, and no rule says where."""
    plan = replace(make_plan(make_blocks(), LayoutMap("batch=8")), free_activations=True)
    table, *others = suggest_rules(plan).rules
    assert r"tokens\.embeddings$" == table.pattern
    assert table.layout.is_fully_replicated()
    assert "replicated: over batch, each step would gather or sum the outputs of a table" == table.reason
    assert all("FSDP" in each.reason for each in others)


def test_the_batch_dim_of_another_name_shards_no_weight():
    """The largest other dim does."""
    rules = suggest(make_blocks(), "x=8,y=2", "x").rules
    assert {"y"} == {
        dim for r in rules for axis in range(r.layout.rank) for dim in r.layout.list_mesh_dims(axis)
    }


@given(models(), st.sampled_from(MESHES))
def test_a_plan_with_suggested_rules_has_no_problems(variables, mesh):
    """The rules are read from their YAML, whose comments are the reasons."""
    rules = suggest(variables, mesh)
    text = rules.to_yaml()
    plan = make_plan(variables, LayoutMap.from_yaml(text))

    comments = re.findall(r"^(?:  # .*\n)+", text, re.MULTILINE)
    assert [rule.reason for rule in rules.rules] == [
        re.sub(r"\n?  # ", " ", each).strip() for each in comments
    ]
    assert () == plan.problems
    assert [] == [problem for problem in plan.lint() if problem.kind != "unused dim"]


def test_a_mesh_of_one_device_needs_no_rules():
    """Everything is replicated."""
    assert () == suggest(make_blocks(), "batch=1,model=1").rules
    assert Mesh(None, "batch=1,model=1") == suggest(make_blocks(), "batch=1,model=1").mesh


WORDS = [*"abcdefgjlmnprstuxyz", "ask", "back", "join", "knit", "merge", "t1", "x0", "zip"]
BLOCKS = {
    "equal": {"q": (64, 64), "k": (64, 64), "v": (64, 64), "o": (64, 64)},
    "wide": {"q": (64, 128), "k": (64, 128), "v": (64, 128), "o": (128, 64)},
    "few keys": {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64)},
    "fused": {"qkv": (64, 192), "o": (64, 64)},
    "keys and values": {"q": (64, 64), "kv": (64, 128), "o": (64, 64)},
}
MLPS = {
    "none": {},
    "mlp": {"up": (64, 256), "down": (256, 64)},
    "gated": {"up": (64, 256), "gate": (64, 256), "down": (256, 64)},
}
ROWS = ("o", "down")


@settings(max_examples=400 if EVERYTHING else 10)
@given(st.data())
def test_names_without_meaning_give_no_weight_the_role_of_another(data):
    """A row takes the outputs of other kernels, and a column before a row passes its outputs. Lint accepts both."""
    library = data.draw(st.sampled_from(["keras", "torch", "nnx", "pytree"]))
    attention, mlp = data.draw(st.sampled_from([*BLOCKS])), data.draw(st.sampled_from([*MLPS]))
    parts = [*BLOCKS[attention].items(), *MLPS[mlp].items()]
    # The numbers of arrays show their order, if their sizes fit.
    words = WORDS if library == "pytree" else [*WORDS, "b1", "b2", "b3", "b4"]
    names = data.draw(st.permutations(words))[: len(parts)]
    inner = data.draw(st.sampled_from(["", "mlp."]))
    has_bias = library != "pytree" and data.draw(st.booleans())
    found, specs, is_row = [make_weight("norm.scale", (64,))], {}, {}
    order = data.draw(st.permutations([*zip(names, parts, strict=True)]))
    turn = -1 if library == "torch" else 1
    has_inputs = library != "pytree" and data.draw(st.booleans())
    first = data.draw(st.sampled_from([0, 2]))  # 0: the MLP reads the input of attention
    calls = {part: part in ROWS for part in BLOCKS[attention]} | dict.fromkeys(MLPS[mlp], first) | {"down": 3}
    leaf = {"torch": ".weight", "pytree": ""}.get(library, ".kernel")
    for name, (part, sizes) in sorted(order) if library in ("nnx", "pytree") else order:
        for number in range(2):
            layer = f"blocks.{number}.{inner if part in MLPS['gated'] else ''}{name}"
            path, roles = f"{layer}{leaf}", ("in.0", "out.0")[::turn] if leaf else ()
            found.append(make_weight(path, sizes[::turn], *roles))
            if has_inputs:
                reads = 4 * number + calls[part]
                found[-1] = replace(found[-1], use=replace(found[-1].use, reads=reads))
            found += [make_weight(f"{layer}.bias", sizes[1:], "out.0")] * has_bias
            is_row[path] = part in ROWS
            specs[path] = (("model", None) if part in ROWS else (None, "model"))[::turn]
    plan = make_plan(found, suggest(found))
    wrong = {}

    def lint(specs):
        rules = {f"{re.escape(path)}$": layout for path, layout in specs.items()}
        found_problems = make_plan(found, LayoutMap("batch=2,model=4", rules, rest="replicated")).lint()
        return [(problem.kind, problem.subject) for problem in found_problems.problems]

    for path, row in is_row.items():
        reason = plan[path].match.rule.reason
        if reason.startswith("row") != row and (has_inputs or "unknown" not in reason):
            wrong[path] = reason

    assert {} == wrong
    assert [] == lint(specs)
    if has_inputs:
        path = data.draw(st.sampled_from([path for path in specs if path.startswith("blocks.1")]))
        if is_row[path]:
            assert ("swapped", path) in lint(specs | {path: specs[path][::-1]})
        elif mlp == "none" and attention != "keys and values":
            assert lint(specs | {path: (None, None)})
