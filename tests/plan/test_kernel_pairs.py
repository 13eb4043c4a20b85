"""Suggested rules and lint of kernels of which one takes the output of another, or is added to it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from decoders import make_dense, make_weight

from layoutmap import LayoutMap
from layoutmap.core.variables import AxisRoles
from layoutmap.plan.suggest_rules import suggest_rules
from layoutmap.scope.plan import make_plan


def suggest(variables, mesh="batch=2,model=4"):
    return suggest_rules(make_plan(variables, LayoutMap(mesh)))


def make_called_weights(calls, **shapes):
    """Make kernels in the order of `shapes`, each with the number of the tensor that it reads."""
    return [
        replace(
            make_weight(f"{path}.kernel", shape),
            use=AxisRoles(("in.0", "out.0"), reads=None if calls is None else calls[n]),
        )
        for n, (path, shape) in enumerate(shapes.items())
    ]


@pytest.mark.parametrize("columns", [192, 96])
def test_the_output_of_a_fused_attention_is_a_row_kernel(columns):
    """It is the next kernel, and takes a third of the fused columns, or more if keys have fewer heads than queries."""
    variables = [
        w
        for n in range(2)
        for name, sizes in (
            ("qkv", (64, columns)),
            ("proj", (64, 64)),
            ("fc1", (64, 256)),
            ("fc2", (256, 64)),
        )
        for w in make_dense(f"blocks.{n}.{name}", sizes)
    ]
    rules = suggest(variables)
    plan = make_plan(variables, rules)

    assert {
        r"blocks\.\d+\.qkv\.kernel$": "column: outputs are sharded, as the inputs of proj are; "
        "fused: a split that crosses shards reshards them",
        r"blocks\.\d+\.proj\.kernel$": "row: takes the sharded outputs of qkv, and the sums are all-reduced over model",
    } == {r.pattern: r.reason for r in rules.rules if "kernel" in r.pattern and "fc" not in r.pattern}
    assert [("unsharded", "model"), ("model",), ("model", "unsharded"), ("unsharded",)] == [
        plan[f"blocks.1.{name}"].layout.sharding_specs
        for name in ("qkv.kernel", "qkv.bias", "proj.kernel", "proj.bias")
    ]
    assert () == (*plan.problems, *plan.lint(), *plan.memory.rows)
    swapped = dict.fromkeys((r".*\.(qkv|fc1|proj)\.kernel",), (None, "model")) | {
        r".*fc2.kernel": ("model", None)
    }
    plan = make_plan(variables, LayoutMap("batch=2,model=4", swapped, rest="replicated"))
    assert [f"blocks.{n}.proj.kernel" for n in range(2)] == [p.subject for p in plan.lint().problems]


def test_kernels_of_fused_projections_have_any_order():
    """A model can list the output projection first. Its name and the sizes are the evidence."""
    sizes = {
        "attn.o_proj": (64, 64),
        "attn.qkv_proj": (64, 128),
        "mlp.gate_up_proj": (64, 256),
        "mlp.down_proj": (128, 64),
    }
    variables = [
        make_weight(f"layers.0.{name}.kernel", shape, "in.0", "out.0") for name, shape in sizes.items()
    ]
    plan = make_plan(variables, suggest(variables))

    assert {
        "attn.o_proj": ("model", "unsharded"),
        "attn.qkv_proj": ("unsharded", "model"),
        "mlp.gate_up_proj": ("unsharded", "model"),
        "mlp.down_proj": ("model", "unsharded"),
    } == {name: plan[f"layers.0.{name}.kernel"].layout.sharding_specs for name in sizes}
    assert () == (*plan.problems, *plan.lint())


@pytest.mark.parametrize(
    "names",
    ["q_lin k_lin v_lin out_lin", "queries keys values unify", "Q K V O", "c_query c_key c_val merge"],
)
@pytest.mark.parametrize("is_array", [False, True])
def test_the_output_of_attention_has_any_name_beside_query_key_and_value(names, is_array):
    """It is the only other kernel of the transposed shape. It can be declared first."""
    *columns, row = names.split()
    sizes = {row: (64, 64)} | dict.fromkeys(columns, (64, 64)) | {"up": (64, 256), "down": (256, 64)}
    suffix, roles = ("", ()) if is_array else (".kernel", ("in.0", "out.0"))
    variables = [
        make_weight(f"b.{n}.{name}{suffix}", shape, *roles) for n in range(2) for name, shape in sizes.items()
    ]
    rules = suggest(variables)
    plan = make_plan(variables, rules)
    kinds = {f"b.1.{name}": plan[f"b.1.{name}{suffix}"].match.rule.reason[:5] for name in (*columns, row)}

    assert dict.fromkeys((f"b.1.{name}" for name in columns), "heads") | {f"b.1.{row}": "row: "} == kinds
    assert () == (*plan.problems, *plan.lint())
    swapped = {rf".*\.{row}\b": (None, "model")} | {rule.pattern: rule.layout for rule in rules.rules}
    plan = make_plan(variables, LayoutMap("batch=2,model=4", swapped, rest="replicated"))
    assert [("swapped", f"b.{n}.{row}{suffix}") for n in range(2)] == [
        (p.kind, p.subject) for p in plan.lint().problems if p not in plan.problems
    ]


def test_the_order_of_two_kernels_is_stated_if_only_their_creation_shows_it():
    """The numbers of the tensors that they read show it, and names and other sizes do."""
    shapes = {"later": (256, 64), "first": (64, 256)}
    unknown = [
        make_weight(f"{n}.{name}.kernel", shapes[name], "in.0", "out.0") for n in range(2) for name in shapes
    ]
    known = [replace(v, use=replace(v.use, reads=int("later" in v.path))) for v in unknown]
    guess = "by sizes and the order in which the layers were made"
    right = {".*first": (None, "model"), ".*later": ("model", None)}
    found = {}
    for name, variables in (
        ("unknown", unknown),
        ("known", known),
        ("wider", [*unknown, make_weight("g", (64, 8))]),
    ):
        rules = suggest(variables).rules
        problems = list(make_plan(variables, LayoutMap("batch=2,model=4", right, rest="replicated")).lint())
        found[name] = (
            [guess in rule.reason for rule in rules if "\\d" in rule.pattern],
            [str(p) for p in problems],
        )

    assert ([False, False], []) == found["known"] == found["wider"]
    assert [True, True] == found["unknown"][0]
    assert [True, True] == [guess in text for text in found["unknown"][1]]
    assert all(
        "its axes seem to be swapped, if later.kernel is called first" in text for text in found["unknown"][1]
    )


@pytest.mark.parametrize("few", [64, 32])
def test_square_kernels_in_unknown_order_are_not_checked(few):
    """The reason of a suggested rule says it, and lint what to pass. An MLP in the same block is in order."""
    shapes = {
        "ask": (64, 64),
        "tag": (64, few),
        "t1": (64, few),
        "join": (64, 64),
        "up": (64, 256),
        "down": (256, 64),
    }
    variables = [
        make_weight(f"{n}.{name}.kernel", s, "in.0", "out.0") for n in range(2) for name, s in shapes.items()
    ]
    rules = suggest(variables)
    plan = make_plan(variables, rules)
    names = [name for name, shape in shapes.items() if shape == (64, 64)]
    reasons = {name: plan[f"1.{name}.kernel"].match.rule.reason for name in shapes}

    assert () == (*plan.problems, *plan.lint())
    assert names == [
        name for name, reason in reasons.items() if "; the order of calls is unknown: inputs= (--" in reason
    ]
    assert {f"{n}.{name}.kernel" for n in range(2) for name in names} == {*plan.lint().unchecked_paths}
    assert "; pass inputs= (--inputs) to check them; batches" in plan.lint().summary


def test_a_kernel_that_is_the_output_by_its_sizes_is_sharded_by_heads():
    """As one with a usual name: 4 devices do not divide 6 heads, so lint reports a split of them."""
    for name in ("output", "unify"):
        shapes = dict.fromkeys(("queries", "keys", "values"), (64, 96)) | {name: (96, 64)}
        variables = [w for path, shape in shapes.items() for w in make_dense(f"a.{path}", shape, 16)]
        split = {rf".*{name}\.kernel": ("model", None)}

        assert {
            "replicated: model=4 does not divide 6 heads",
            "replicated, as the inputs of its layer are",
        } == {rule.reason for rule in suggest(variables, "model=4").rules}
        plan = make_plan(variables, LayoutMap("batch=2,model=4", split, rest="replicated"))
        assert ["heads"] == [p.kind for p in plan.lint()]


def test_two_kernels_with_blocks_between_their_calls_are_no_pair():
    """Their sizes fit, but the blocks have pairs of their own."""
    shapes = {"into": (20, 32), "b.0.up": (32, 128), "b.0.down": (128, 32), "exit": (32, 8)}
    uses = [AxisRoles(("in.0", "out.0"), reads=reads) for reads in range(4)]
    variables = [
        replace(make_weight(f"{path}.kernel", shape), use=use)
        for (path, shape), use in zip(shapes.items(), uses, strict=True)
    ]

    assert [(r"b\.0\.down\.kernel$", "up")] == [
        (rule.pattern, *re.findall("sharded outputs of ([^,]*)", rule.reason))
        for rule in suggest(variables).rules
        if rule.reason.startswith("row")
    ]


def test_of_two_possible_first_kernels_the_one_called_last_is_read():
    """Another layer reads the output of the earlier one, so its layout does not follow that of the pair."""
    shapes = {"early": (7, 8), "late": (2, 16, 8), "taker": (8, 16)}
    roles = {2: ("in.0", "out.0"), 3: ("", "in.0", "out.0")}
    variables = [
        replace(make_weight(f"{name}.kernel", shape), use=AxisRoles(roles[len(shape)], reads=reads))
        for reads, (name, shape) in enumerate(shapes.items())
    ]

    rules = suggest(variables, "batch=2,model=4")

    assert {r"late\.kernel$": "column: outputs are sharded, as the inputs of taker are"} == {
        rule.pattern: rule.reason for rule in rules.rules if "inputs of taker" in rule.reason
    }
    assert not make_plan(variables, rules).lint()


@pytest.mark.parametrize("shapes", [{"kv": (32, 64)}, dict.fromkeys(("k0", "v0"), (32, 32))])
def test_equal_blocks_have_equal_roles_if_the_first_reads_the_memory_as_its_input(shapes):
    """The kernels of keys and values read it in each block, and that of the query only in the first."""
    shapes = {"ask": (32, 32)} | shapes | {"join": (32, 32), "widen": (32, 64), "narrow": (64, 32)}
    variables = []
    for block, (name, shape) in itertools.product(range(2), reversed(shapes.items())):
        call = {"ask": 0, "join": 1, "widen": 2, "narrow": 3}.get(name)
        use = AxisRoles(("in.0", "out.0"), reads=0 if call is None else 4 * block + call)
        variables.append(replace(make_weight(f"{block}.{name}.kernel", shape), use=use))

    plan = make_plan(variables, suggest(variables))

    rows = {v.path for v in variables if plan[v.path].layout.sharding_specs == ("model", "unsharded")}
    assert {f"{n}.{name}.kernel" for n in range(2) for name in ("join", "narrow")} == rows
    assert not plan.lint()


def test_layers_of_a_flat_model_have_the_reasons_of_their_pair():
    """Its blocks are in one list. A head that no layer follows has another reason."""
    variables = [
        w
        for n in range(2)
        for name, sizes in (("into", (64, 256)), ("back", (256, 64)))
        for w in make_dense(f"{name}_{n}", sizes)
    ]
    rules = suggest([*variables, *make_dense("logits", (64, 512))])

    assert {
        r"into_\d+\.kernel$": "column: outputs are sharded, as the inputs of the next layer are",
        r"back_\d+\.kernel$": "row: takes the sharded outputs of the layer before, "
        "and the sums are all-reduced over model",
        r"logits\.kernel$": "column: outputs are sharded, and gathered if what follows needs all of them",
    } == {rule.pattern: rule.reason for rule in rules.rules if "kernel" in rule.pattern}


def test_a_kernel_after_one_of_two_pairs_takes_what_its_pair_leaves():
    """Plain arrays that fit in both orders: the last one is suggested before the one whose outputs it takes."""
    shapes = {"z.weight": (24, 12), "l1": (16, 16), "l2": (16, 24), "l3.w": (8, 24), "l4": (24, 8)}
    variables = [make_weight(path, shape) for path, shape in shapes.items()]
    rules = {rule.pattern: rule.layout for rule in suggest(variables, "batch=4,model=2").rules}

    assert [] == [*make_plan(variables, LayoutMap("batch=4,model=2", rules, rest="replicated")).lint()]


def test_low_rank_factors_are_sharded_as_their_base_kernel():
    """Beside a base kernel with outputs over a dim, the first factor is replicated. The module has the base's role."""
    shapes = {
        "query.base": (64, 64),
        "query.down": (64, 4),
        "query.up": (4, 64),
        "key": (64, 64),
        "value": (64, 64),
    }
    shapes |= {"join.base": (64, 64), "join.down": (64, 4), "join.up": (4, 64)}
    variables = make_called_weights((0, 0, 1, 0, 0, 2, 2, 3), **shapes)

    plan = make_plan(variables, suggest(variables))

    assert {
        "query.base": (None, "model"),
        "query.down": (None, None),
        "query.up": (None, "model"),
        "join.base": ("model", None),
        "join.down": ("model", None),
        "join.up": (None, None),
    } == {
        name: tuple(
            None if spec == "unsharded" else spec for spec in plan[f"{name}.kernel"].layout.sharding_specs
        )
        for name in shapes
        if "." in name
    }
    assert "low-rank factor: sharded as the inputs of its base kernel are" in {
        rule.reason for rule in suggest(variables).rules
    }
    assert not plan.lint()


@pytest.mark.parametrize("calls", [(0, 1, 2), None])
def test_kernels_that_are_not_added_to_another_are_no_low_rank_factors(calls):
    """The second reads the output of the first, or nobody knows what it reads."""
    variables = make_called_weights(calls, **{"b.base": (64, 64), "b.down": (64, 4), "b.up": (4, 64)})

    assert not any("low-rank" in rule.reason for rule in suggest(variables).rules)


def test_a_layer_that_peft_wraps_has_the_role_of_its_module():
    """Its factors are derived variables."""
    names = ("q_proj.base_layer", "k_proj", "v_proj.base_layer", "o_proj.base_layer")
    variables = make_called_weights(None, **{f"0.attn.{name}": (64, 64) for name in names})

    plan = make_plan(variables, suggest(variables))

    assert [(r"0\.attn\.o_proj\.base_layer\.kernel$", "q_proj")] == [
        (rule.pattern, *re.findall("sharded outputs of ([^,]*)", rule.reason))
        for rule in suggest(variables).rules
        if rule.reason.startswith("row")
    ]
    assert not plan.lint()


def find_sharded_axes(variables):
    """Return the sharded axis for each path, or None, in a plan with the suggested rules. Lint accepts the plan."""
    plan = make_plan(variables, suggest(variables))
    assert not plan.lint()
    return {
        v.path: next(
            (n for n, spec in enumerate(plan[v.path].layout.sharding_specs) if spec == "model"), None
        )
        for v in variables
    }


@pytest.mark.parametrize("calls", [(0, 1, 1, 1, 2, 3, 4), None])
def test_a_layer_in_a_module_of_its_own_is_one_of_the_outer_block(calls):
    """As in BERT: each layer of an MLP is the only kernel of its module, and so is the output of attention."""
    shapes = {"embed.dense": (32, 64)}
    shapes |= {f"0.attention.self.{part}": (64, 64) for part in ("query", "key", "value")}
    shapes |= {"0.attention.output.dense": (64, 64)}
    shapes |= {"0.intermediate.dense": (64, 256), "0.output.dense": (256, 64)}
    variables = make_called_weights(calls, **shapes)

    axes = find_sharded_axes(variables)
    swapped = {r".*kernel": (None, "model")}
    plan = make_plan(variables, LayoutMap("batch=2,model=4", swapped, rest="replicated"))

    rows = {"0.attention.output.dense.kernel", "0.output.dense.kernel"}
    assert dict.fromkeys(axes, 1) | dict.fromkeys(rows, 0) == axes
    assert rows == {p.subject for p in plan.lint() if p.kind == "swapped"}


def test_each_two_layers_of_a_chain_are_a_pair():
    """The kernels between the first and the last are square."""
    shapes = {"alpha": (64, 256), "beta": (256, 256), "gamma": (256, 256), "delta": (256, 64)}

    axes = find_sharded_axes(make_called_weights((0, 1, 2, 3), **shapes))

    assert [1, 0, 1, 0] == [*axes.values()]


def test_two_square_kernels_of_a_block_are_a_pair():
    """As in a residual block. Two at the root of a model can be of two towers."""
    shapes = {"0.first": (64, 64), "0.second": (64, 64)}

    axes = find_sharded_axes(make_called_weights((0, 1), **shapes))
    roots = find_sharded_axes(make_called_weights((0, 1), user=(64, 64), item=(64, 64)))

    assert [1, 0] == [*axes.values()]
    assert [1, 1] == [*roots.values()]


@pytest.mark.parametrize("wide", [256, 64])
def test_arrays_beside_the_only_kernel_of_a_module_can_be_low_rank_factors(wide):
    """They have unknown roles. If the base kernel is square, it is unknown which factor is the first."""
    shapes = {"up.base": (64, wide), "down.base": (wide, 64)}
    variables = make_called_weights((0, 1), **shapes)
    for name, (into, out) in shapes.items():
        module = name.partition(".")[0]
        variables += [make_weight(f"{module}.a", (into, 4)), make_weight(f"{module}.b", (4, out))]

    axes = find_sharded_axes(variables)

    assert {"up.base.kernel": 1, "down.base.kernel": 0}.items() <= axes.items()
    expected = {"up.a": None, "up.b": 1, "down.a": 0, "down.b": None}
    if wide == 64:
        expected = dict.fromkeys(expected)
    assert expected == {path: each for path, each in axes.items() if "base" not in path}


def test_a_bias_of_several_heads_is_no_second_query():
    """It has two axes and the name of one."""
    shapes = {"w_q": (64, 8, 8), "w_k": (64, 4, 8), "w_v": (64, 4, 8), "b_q": (8, 8), "w_o": (8, 8, 64)}

    axes = find_sharded_axes([make_weight(f"0.{name}", shape) for name, shape in shapes.items()])

    assert [1, 1, 1, 0, 0] == [*axes.values()]


def test_kernels_that_sizes_alone_pair_with_the_next_are_a_guess():
    """One of two of equal shapes can be of fused keys and values. Names such as up and gate show that it is none."""
    for names, is_guess in ((("a", "c", "d"), True), (("gate", "up", "down"), False)):
        shapes = dict(zip(names, ((32, 64), (32, 64), (64, 32)), strict=True))
        variables = make_called_weights(None, **{f"b.{name}": shape for name, shape in shapes.items()})

        assert {is_guess} == {"by sizes" in rule.reason for rule in suggest(variables).rules}


def test_an_output_layer_that_sums_over_shards_is_reported_without_a_table():
    """Its name shows it, if it has more outputs than inputs."""
    variables = make_called_weights(None, head=(32, 128), classifier=(32, 16), other=(48, 96))
    rules = {".*kernel": ("model", None)}

    plan = make_plan(variables, LayoutMap("batch=2,model=4", rules, rest="replicated"))

    assert [("swapped", "head.kernel")] == [(p.kind, p.subject) for p in plan.lint()]


def test_findings_of_numbered_layers_in_one_block_are_one():
    """The other kernel of each pair has a number, too."""
    shapes = {
        f"{name}{n}": shape for n in range(3) for name, shape in (("up", (64, 256)), ("down", (256, 64)))
    }
    variables = make_called_weights(range(6), **shapes)

    findings = str(make_plan(variables, LayoutMap("batch=2,model=4", {".*": (None, "model")})).lint())

    assert "swapped: down{0..2}.kernel: outputs an axis" in findings
    assert "away from up{0..2}.kernel\n" in findings
    assert "Lint: 1 finding;" in findings


def test_factors_with_a_known_axis_for_the_rank_follow_the_kernel_of_the_outer_layer():
    """As in LoRALinear of flax.nnx."""
    variables = make_called_weights((0, 1), up=(64, 256), down=(256, 64))
    for name, (into, out) in {"up": (64, 256), "down": (256, 64)}.items():
        variables.append(make_weight(f"{name}.lora.a", (into, 4), "in.0", ""))
        variables.append(make_weight(f"{name}.lora.b", (4, out), "", "out.0"))

    axes = find_sharded_axes(variables)

    assert {"up.lora.a": None, "up.lora.b": 1, "down.lora.a": 0, "down.lora.b": None}.items() <= axes.items()


def test_an_output_layer_is_known_by_its_name_if_another_layer_takes_as_many_features():
    """Its size does not show it then."""
    shapes = {"up": (32, 128), "down": (128, 32), "head": (32, 128)}
    rules = {"up": (None, "model"), "down|head": ("model", None)}

    plan = make_plan(make_called_weights((0, 1, 2), **shapes), LayoutMap("batch=2,model=4", rules))

    assert ["head.kernel"] == [p.subject for p in plan.lint()]


def test_the_kernels_of_one_query_and_of_fused_keys_and_values_are_before_the_output():
    """Their sizes are equal, and the three are alone in their block."""
    shapes = dict.fromkeys(("0.ask", "0.both", "0.back"), (64, 64))

    assert [1, 1, 0] == [*find_sharded_axes(make_called_weights((0, 0, 1), **shapes)).values()]


def test_a_depthwise_kernel_is_in_no_pair():
    """Its outputs have the shards of its inputs, so it is no first kernel of the one after it, as in ConvNeXt."""
    variables = make_called_weights((1, 2), **{"0.up": (32, 128), "0.down": (128, 32)})
    depthwise = replace(
        make_weight("0.dw.kernel", (7, 7, 1, 32)), use=AxisRoles(("", "", "in.0", "out.0"), reads=0)
    )

    axes = find_sharded_axes([depthwise, *variables])

    assert {"0.dw.kernel": None, "0.up.kernel": 1, "0.down.kernel": 0} == axes


@pytest.mark.parametrize("calls", [(0, 1, 2), None])
def test_fused_keys_and_values_of_cross_attention_have_the_output_of_their_query(calls):
    """They read another tensor, so only names show it."""
    shapes = {"0.to_q": (64, 64), "0.to_kv": (32, 128), "0.merge": (64, 64)}

    axes = find_sharded_axes(make_called_weights(calls, **shapes))

    assert [1, 1, 0] == [*axes.values()]


def test_an_unknown_vector_does_not_order_two_arrays():
    """It can have the width of the model, or be a bias between the two."""
    for size in (32, 128):
        shapes = {"alpha": (32, 128), "beta": (128, 32), "c": (size,)}

        axes = find_sharded_axes([make_weight(f"0.{name}", shape) for name, shape in shapes.items()])

        assert {"0.alpha": 1, "0.beta": 0}.items() <= axes.items()
