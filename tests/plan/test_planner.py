"""A plan assigns every variable, counts every byte and collects every problem; it touches nothing."""

import re
import textwrap
from dataclasses import replace

import pytest
from hypothesis import given

import layoutmap as lm
from layoutmap.core.uneven import apply_uneven_policy
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.plan.problems import Problem, merge_problems
from layoutmap.report.rows import make_table_rows
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.testing import strategies

MESH = lm.Mesh(None, "batch=2,model=4")


def text(message):
    return textwrap.dedent(message).strip()


def weight(path, shape=(16, 64), **rest):
    return VariableSpec(path, shape, "float32", **rest)


def slot(parent, name="momentum", shape=(16, 64)):
    return VariableSpec(f"optimizer.{parent}.{name}", shape, "float32", Kind.SLOT, parent=parent)


def plan_of(variables, rules, **options):
    return make_plan(variables, lm.LayoutMap(MESH, rules), **options)


def only_problem(plan):
    (problem,) = plan.problems
    return problem


# Those of a rank, an uneven axis and a shadowed rule are in `report/test_golden`.
KINDS = {
    "no rule": (
        [weight("d1.kernel"), weight("d2.kernel")],
        {r"d1\.kernel": (None, "model")},
        "warning",
        r"""
        d2.kernel: no rule matches, so it is replicated
          shape        (16, 64)
          near misses  d1\.kernel
          why          every device holds all 4,096 bytes of it
          fix          add a rule: layout_map[r"d2\.kernel$"] = (None, 'model')
        """,
    ),
    "unused rule": (
        [weight("d1.kernel")],
        {r"d1\.kernel": (None, "model"), r"d1\.kernl": (None, "model")},
        "warning",
        r"""
        rule 2  d1\.kernl: matches no variable
          near misses  d1.kernel
          why          rules match from the start of a path, and none of the model's 1 path matches this pattern
          fix          delete it, because rule 1 matches d1.kernel
        """,
    ),
    "unused rule of all blocks": (
        [weight("blocks.0.up"), weight("blocks.1.up")],
        {r"blocks\.\d+\.upp": (None, "model"), r"blocks\.\d+\.up": (None, "model")},
        "warning",
        r"""
        rule 1  blocks\.\d+\.upp: matches no variable
          near misses  blocks.0.up
          why          rules match from the start of a path, and none of the model's 2 paths matches this pattern
          fix          delete it, because rule 2 matches blocks.0.up
        """,
    ),
    "unused rule of one block": (
        [weight("blocks.0.up"), weight("blocks.1.up")],
        {r"blocks\.0\.upp": (None, "model"), r"blocks\.\d+\.up": (None, "model")},
        "warning",
        r"""
        rule 1  blocks\.0\.upp: matches no variable
          near misses  blocks.0.up
          why          rules match from the start of a path, and none of the model's 2 paths matches this pattern
          fix          did you mean r"blocks\.0\.up$"? else delete it
        """,
    ),
    "global init": (
        [weight("d1.kernel")],
        {r"d1\..*": (None, "model")},
        "note",
        """
        d1.kernel: its global value is initialized on one device, then sharded
          bytes  4,096
          why    it is not to be split
          fix    use one of the library's own initializers, or load a checkpoint
        """,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_problem_is_reported_in_full(kind):
    """A problem says what, where, why, and what to type instead."""
    variables, rules, severity, message = KINDS[kind]
    global_init = {("", "d1.kernel"): "it is not to be split"} if kind == "global init" else None
    problem = only_problem(plan_of(variables, rules, global_init=global_init))

    assert kind.startswith(problem.kind)
    assert (severity, text(message)) == (problem.severity, str(problem))


def test_a_rule_for_slots_is_refused_by_name():
    """It matches nothing, and what is said is why, and what shards slots."""
    slot = VariableSpec("optimizer.d1.kernel.momentum", (16, 64), "float32", Kind.SLOT, parent="d1.kernel")
    plan = plan_of([weight("d1.kernel"), slot], {"d1": (None, "model"), r"optimizer\..*": ("batch", None)})

    assert "unused rule" == only_problem(plan).kind
    assert str(only_problem(plan)) == text(r"""
        rule 2  optimizer\..*: rules do not apply to an optimizer's slots
          why   each slot has the layout of its weight
          fix   delete it, and shard the weight; for optax, build_optimizer(.., zero_dim=) shards slots alone (ZeRO-1)
        """)


def test_a_rule_for_a_layer_whose_name_begins_as_slots_do_is_not_one_for_slots():
    """That it matches nothing has the usual reason."""
    plan = plan_of([weight("optimizer_net.up.kernel")], {r"optimizer_net\.upp\.kernel": (None, "model")})

    unused = next(p for p in plan.problems if p.kind == "unused rule")
    assert "slots" not in str(unused)


def mlp_variables(first, second, *, block="h.{}.", num_blocks=3):
    """Two kernels and two biases in each block, whose names differ in one number."""
    return [
        weight(f"{block.format(n)}{name}.{kind}", shape if kind == "kernel" else shape[1:])
        for n in range(num_blocks)
        for name, shape in ((first, (16, 64)), (second, (64, 16)))
        for kind in ("kernel", "bias")
    ]


NAMES = [
    ("fc1", "fc2"),
    ("dense", "dense_1"),
    ("dense_1", "dense_2"),
    ("w1", "w2"),
    ("conv2d_1x1", "conv2d_3x3"),
]


@pytest.mark.parametrize("rest", [None, "replicated"])
@pytest.mark.parametrize("block", ["h.{}.", "block_{}.", "layer_2.h{}.mlp_1."])
@pytest.mark.parametrize("names", NAMES, ids="-".join)
@pytest.mark.parametrize("wrong", range(3))
def test_a_mistyped_rule_is_corrected_to_the_layer_of_its_number(wrong, names, block, rest):
    """In all blocks. After this one correction the plan has no problems, and the layouts that were meant."""
    variables = mlp_variables(*names, block=block)
    before = block.format(7).replace(".", r"\.").replace("7", r"\d+")
    good = {
        rf"{before}{names[0]}\.kernel$": (None, "model"),
        rf"{before}{names[0]}\.bias$": ("model",),
        rf"{before}{names[1]}\.kernel$": ("model", None),
    }
    meant = [*good][wrong]
    typo = meant.replace("kernel", "kernal").replace("bias", "bais")
    rules = {typo if pattern == meant else pattern: specs for pattern, specs in good.items()}
    plan = make_plan(variables, lm.LayoutMap(MESH, rules, rest=rest))

    assert [f'did you mean r"{meant}"? else delete it'] == [
        p.fix for p in plan.problems if p.kind == "unused rule"
    ]
    assert all(
        p.fix == f'correct rule {wrong + 1}  {typo} to r"{meant}", or add a rule'
        for p in plan.problems
        if p.kind == "no rule" and p.subject.startswith(block.format(1)) and re.match(meant, p.subject)
    )


def test_a_mistyped_rule_whose_layer_has_a_rule_is_deleted():
    """Another layer is less similar, so it was not meant."""
    rules = {r"h\.\d+\.fc1\.kernal$": (None, "model"), r"h\.\d+\.fc1\.kernel$": (None, "model")}
    (unused,) = (p for p in plan_of(mlp_variables("fc1", "fc2"), rules).problems if p.kind == "unused rule")

    assert "delete it, because rule 2 matches h.0.fc1.kernel" == unused.fix


def test_each_of_two_mistyped_rules_is_corrected_to_its_own_layer():
    """Merged problems of blocks keep two layers apart whose names differ in a number only."""
    rules = {r"h\.\d+\.fc1\.kernal$": (None, "model"), r"h\.\d+\.fc2\.kernal$": ("model", None)}
    problems = merge_problems(plan_of(mlp_variables("fc1", "fc2"), rules).problems)

    assert {
        (
            "h.{0..2}.fc1.kernel",
            r'correct rule 1  h\.\d+\.fc1\.kernal$ to r"h\.\d+\.fc1\.kernel$", or add a rule',
        ),
        (
            "h.{0..2}.fc2.kernel",
            r'correct rule 2  h\.\d+\.fc2\.kernal$ to r"h\.\d+\.fc2\.kernel$", or add a rule',
        ),
    } == {(p.subject, p.fix) for p in problems if p.fix.startswith("correct")}


CORRECTIONS = {
    "a layer without a rule is preferred": (
        {r"h\.\d+\.fc1\.kernel$": 2, r"h\.\d+\.fc\.kernel$": 2},
        r"h\.\d+\.fc2\.kernel$",
    ),
    "a number without a regex is kept": ({r"h\.1\.fc2\.kernal$": 2}, r"h\.1\.fc2\.kernel$"),
    "a block number that was left out": ({r"h\.fc2\.kernel$": 2}, r"h\.\d+\.fc2\.kernel$"),
    "a class of digits": ({r"h\.\d+\.fcc[12]\.bias$": 1}, r"h\.\d+\.fc\d+\.bias$"),
    "a regex that also matches dots": ({r".*fc2.*kernal$": 2}, r"h\.\d+\.fc2\.kernel$"),
    "an earlier rule of one block": (
        {r"h\.0\.fc2\.kernel$": 2, r"h\.\d+\.fc2\.kernal$": 2},
        r"h\.\d+\.fc2\.kernel$",
    ),
    "a later rule of one block": (
        {r"h\.\d+\.fc2\.kernal$": 2, r"h\.0\.fc2\.kernel$": 2},
        r"h\.(1|2)\.fc2\.kernel$",
    ),
    "a later rule of all kernels": ({r"h\.\d+\.fc2\.kernal$": 2, r".*kernel$": 2}, r"h\.\d+\.fc2\.kernel$"),
    "the rank of the layout": ({r"h\.\d+\.fc2\.$": 1}, r"h\.\d+\.fc2\.bias$"),
}


@pytest.mark.parametrize("case", CORRECTIONS)
def test_a_corrected_rule_determines_layouts_and_leaves_all_others_used(case):
    """It matches the paths that the mistyped pattern describes."""
    ranks, expected = CORRECTIONS[case]
    rules = {pattern: (None,) * rank for pattern, rank in ranks.items()}
    plan = plan_of(mlp_variables("fc1", "fc2"), rules)
    (unused,) = [p for p in plan.problems if p.kind == "unused rule"]
    corrected = {
        expected if pattern == unused.subject else pattern: specs for pattern, specs in rules.items()
    }

    assert f'did you mean r"{expected}"? else delete it' == unused.fix
    assert {"no rule"} >= {p.kind for p in plan_of(mlp_variables("fc1", "fc2"), corrected).problems}


ALTERNATIVES = {
    "of used ones": (r".*\.(sueeze|widen)\.kernel", r".*\.(squeeze|widen)\.kernel"),
    "of all that begin so": (r".*\.(widen|dwon.*)\.kernel", r".*\.(widen|down.*)\.kernel"),
    "of the variable": (
        r".*\.(squeeze|widen|down)\.(kernle|kernal)",
        r".*\.(squeeze|widen|down)\.(kernel|kernal)",
    ),
    "of none that is used": (r"h\.\d+\.(widne|squeze)\.kernel", r"h\.\d+\.(widen|squeze)\.kernel"),
    "beside a short word": (r"(h|g)\.\d+\.oot\.kernel", r"(h|g)\.\d+\.out\.kernel"),
    "beside the word": (r".*\.(squeeze|widen|down)\.kernle", r".*\.(squeeze|widen|down)\.kernel"),
}


@pytest.mark.parametrize("rest", [None, "replicated"])
@pytest.mark.parametrize("name", ALTERNATIVES)
def test_a_mistyped_word_of_a_rule_is_corrected_and_the_rest_is_kept(name, rest):
    """The alternatives of the rule stay, also if one of them matches."""
    typo, expected = ALTERNATIVES[name]
    variables = [
        v for n in range(2) for v in (*mlp_variables("widen", "squeeze"), *mlp_variables("down", "out"))
    ]
    problems = make_plan(variables, lm.LayoutMap(MESH, {typo: (None, "model")}, rest=rest)).problems

    assert [expected] == [re.findall(r'mean r"(.*)"', p.fix)[0] for p in problems if p.kind == "unused rule"]
    assert all(
        f'correct rule 1  {typo} to r"{expected}", or add a rule' == p.fix
        for p in problems
        if p.kind == "no rule" and p.fix.startswith("correct")
    )


ALTERNATIVES_WITHOUT_MATCH = {
    "a letter that is wrong": (r"h\.\d+\.attn\.(query|key|valu)\.kernel", "valu", "value"),
    "two letters in the wrong order": (r"h\.\d+\.attn\.(query|key|vlaue)\.kernel", "vlaue", "value"),
    "two of two letters": (r".*\.(wq|wk|vw)$", "vw", "wv"),
    "another letter in a short word": (r".*\.(wq|wk|wo|wz)$", "wz", "wv"),
    "a word of one letter": (r".*\.(q|k|x)_proj", "x", "v"),
    "the first letter alone": (r"h\.\d+\.attn\.(q|key|value)\.kernel", "q", "query"),
    "a letter too many": (r".*\.(wq|wk|wvv)$", "wvv", "wv"),
    "letters too many before another word": (r".*\.(q|k|vee)_proj", "vee", "v"),
    "a digit too many": (r".*\.(fc1|fc22)\.kernel", "fc22", "fc2"),
    "a name of two words": (r".*(lift_gate|lift_val)\.kernel", "lift_val", "lift_value"),
    "two alternatives": (r".*\.(quer|key|vlue)\.kernel", "quer, vlue", "query|key|value"),
    "in an inner group": (r"h\.\d+\.(w(q|k)|attn\.(key|valeu)\.kernel)$", "valeu", "value"),
    "words with a quantifier": (r".*\.(key|vlaue.*)\.kernel", "vlaue.*", "value.*"),
    "of no similar name": (r".*\.(wq|wk|wz)$", "wz", ""),
    "of a name that another one begins with": (r".*\.(que|query)\.kernel", "que", ""),
    "of other models": (r".*\.(key|gate)\.kernel", "gate", ""),
    "with another number": (r".*\.(fc1|fc3)\.kernel", "fc3", ""),
    "with a quantifier": (r".*\.(fc1|fcs?)\.kernel", "fcs?", ""),
    "of a variable": (r".*\.(fc1|biass)\.kernel", "biass", ""),
    "with all inner ones": (r"(h\.\d+\.w[qk]|g\.(a|b))$", r"g\.(a|b)", ""),
    "of rank 1": (r".*\.(key|valu)\.bias", "valu", ""),
}


@pytest.mark.parametrize("rest", [None, "replicated"])
@pytest.mark.parametrize("name", ALTERNATIVES_WITHOUT_MATCH)
def test_each_alternative_that_matches_nothing_is_named(name, rest):
    """A warning corrects it if a similar name has no rule. Else it may be for other models, so it gets a note."""
    pattern, unused, correction = ALTERNATIVES_WITHOUT_MATCH[name]
    shapes = dict.fromkeys([f"attn.{part}.kernel" for part in ("query", "key", "value")], (16, 64))
    shapes |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), (16, 64))
    shapes |= dict.fromkeys(("lift_gate.kernel", "lift_value.kernel", "wq", "wk", "wv", "wo"), (16, 64))
    shapes |= {
        "fc1.kernel": (16, 64),
        "fc2.kernel": (64, 16),
        "attn.key.bias": (64,),
        "attn.value.bias": (64, 1),
    }
    variables = [weight(f"h.{n}.{path}", shape) for n in range(2) for path, shape in shapes.items()]
    specs = ("model",) if pattern.endswith("bias") else (None, "model")
    problems = make_plan(variables, lm.LayoutMap(MESH, {pattern: specs}, rest=rest)).problems
    (problem,) = [p for p in problems if p.kind == "unused rule"]

    assert ("warning" if correction else "note") == problem.severity
    assert re.fullmatch(
        rf"rule 1  {re.escape(pattern)}: {re.escape(unused)} match(es)? no variable", problem.what
    )
    assert (
        ("did you mean" in problem.fix)
        == bool(correction)
        == (correction in problem.fix and correction != "")
    )
    assert f"delete {unused} from it" in problem.fix


@pytest.mark.parametrize(
    "pattern",
    [r"(.*\.)?(fc1|fc3)\.kernel?", "d1", r".*(fc1|fc2)", r".*fc1(|_proj)\.", r".*(fc3|fc4)?\.kernel"],
)
def test_alternatives_that_are_optional_or_used_are_no_problem(pattern):
    """An alternative that may be left out is for several models, as one of a preset is."""
    variables = [weight("h.0.fc1.kernel"), weight("h.0.fc2.kernel")]
    rules = {pattern: (None, "model")} if pattern[0] == "." else lm.LayoutMap.preset("llama_nnx", MESH)
    problems = make_plan(variables, lm.LayoutMap(MESH, rules, rest="replicated")).problems

    assert "match" not in "".join(p.what.rpartition(": ")[2] for p in problems if p.severity == "note")


def test_a_pattern_to_match_anywhere_keeps_its_flags_at_the_start():
    """In another place they are no regex."""
    plan = plan_of([weight("d1.kernel")], {r"(?i)KERNEL": (None, "model")})

    assert 'to match anywhere in a path: r"(?i).*KERNEL"' in [p.fix for p in plan.problems]


def test_an_exact_key_beats_a_rule_that_comes_before():
    """As in the map itself, a rule whose text is the path wins over one whose regex matches it."""
    plan = plan_of([weight("d1.kernel")], {r"d1\..*": (None, "model"), "d1.kernel": ("model", None)})

    assert ("model", "unsharded") == plan["d1.kernel"].layout.sharding_specs
    assert ["shadowed rule"] == [p.kind for p in plan.problems]


def test_problems_of_rules_wait_until_all_variables_are_known():
    """A rule that matches nothing yet may match what a first call makes."""
    plan = plan_of([weight("d1.kernel")], {r"d1\..*": (None, None), "later": (None,)}, complete=False)

    assert () == plan.problems


def test_what_needs_no_rule():
    """Seeds, slots and metrics need no rule; a seed may have one; a slot lies where its weight lies."""
    variables = [
        weight("d1.kernel"),
        VariableSpec("drop.seed", (2,), "uint32", Kind.RNG),
        slot("d1.kernel"),
        slot("d1.kernel", "row", (16,)),
        VariableSpec("optimizer.iterations", (), "int32", Kind.SLOT),
        VariableSpec("loss.total", (), "float32", Kind.METRIC),
    ]
    plan = plan_of(variables, {r"d1\.kernel": ("batch", "model")})

    assert () == plan.problems
    assert plan["d1.kernel"].layout == plan["optimizer.d1.kernel.momentum"].layout
    others = [
        a for a in plan.assignments if a.variable.path not in ("d1.kernel", "optimizer.d1.kernel.momentum")
    ]
    assert all(a.layout.is_fully_replicated() for a in others)


def test_a_slot_follows_the_weight_of_its_own_model():
    """Two models of one scope may have equal paths and different layouts of their slots' weights."""
    variables = [
        weight("d1.kernel", model="a"),
        weight("d1.kernel", (16, 16), model="b"),
        VariableSpec("optimizer.d1.kernel.m", (16, 16), "float32", Kind.SLOT, parent="d1.kernel", model="b"),
    ]
    plan = plan_of(variables, {"d1.kernel": (None, "model")})

    assert (16, 4) == plan.assignments[2].shard_shape


def test_a_problem_of_a_slot_is_reported_at_its_weight():
    """A layout that does not fit a weight is one problem, however many slots follow it."""
    plan = plan_of([weight("d1.kernel", (16, 6)), slot("d1.kernel", shape=(16, 6))], {"d1": (None, "model")})

    assert ["d1.kernel"] == [p.subject for p in plan.errors]
    assert 0 == plan.device_bytes
    assert 2 * 16 * 6 * 4 == plan.global_bytes


def test_repeated_blocks_are_one_problem():
    """Thirty-two equal blocks have one message, with the numbers in one, and a pattern that matches them all."""
    plan = plan_of(
        [weight(f"blocks.{i}.up.kernel", (16, 6)) for i in range(32)], {r".*kernel": (None, "model")}
    )
    (problem,) = merge_problems(plan.problems)

    assert 32 == len(plan.problems)
    assert "blocks.{0..31}.up.kernel" == problem.subject
    assert "blocks.{0..31}.up.kernel: axis 1 cannot be split evenly" == problem.what
    no_rule = plan_of([weight(f"blocks.{i}.b", (6,)) for i in range(3)], {})
    assert r'add a rule: layout_map[r"blocks\.\d+\.b$"] = (None,)' == merge_problems(no_rule.problems)[0].fix


def test_a_map_that_says_that_the_rest_is_replicated_is_strict():
    """No variable is warned of, an unused rule still is; the plan says why, and so does its file."""
    layout_map = lm.LayoutMap(MESH, {r".*kernel": (None, "model")}, rest="replicated")
    plan = make_plan(
        [weight("d1.kernel"), weight("d1.bias", (6,)), weight("d1.mean", (6,), kind=Kind.STATE)], layout_map
    ).check(strict=True)

    for each in (plan, Plan.from_json(plan.to_json())):
        assert [] == list(each.problems)
        assert (
            '  because     no rule matches, so it is replicated, as layout_map.rest = "replicated" says'
            in (each.explain("d1.bias").splitlines())
        )
        assert ["1", "the rest", "the rest"] == [row.rule_text for row in make_table_rows(each)]
    layout_map["typo"] = (None,)
    with pytest.raises(lm.PlanError, match=r"rule 2  typo: matches no variable"):
        make_plan([weight("d1.kernel"), weight("d1.bias", (6,))], layout_map).check(strict=True)


def test_strict_says_how_the_rest_is_accepted():
    """The fix of one missing rule, and that of many, is also the map's `rest`."""
    rest = 'set layout_map.rest = "replicated" if that is meant'
    for names in (["a"], ["a", "b"]):
        with pytest.raises(lm.PlanError) as refused:
            plan_of([weight(name) for name in names], {}).check(strict=True)
        assert str(refused.value).endswith(rest)


def test_rules_are_never_merged():
    """Two unused rules that differ in a number stay two: one made of both would be a pattern that nobody wrote."""
    plan = plan_of([], {r"block_1\.kernel": (None,), r"block_2\.kernel": (None,)})

    assert [
        r"rule 1  block_1\.kernel: matches no variable",
        r"rule 2  block_2\.kernel: matches no variable",
    ] == [problem.what for problem in merge_problems(plan.problems)]


def test_check_raises_once_with_everything():
    """Ten problems are shown in full and the rest counted; all are in `problems`."""
    plan = plan_of([weight(f"{c}.kernel", (16, 6)) for c in "abcdefghijkl"], {r".*kernel": (None, "model")})
    with pytest.raises(lm.PlanError) as caught:
        plan.check()

    assert plan.problems == caught.value.problems
    assert str(caught.value).startswith(
        "12 problems\na.kernel: axis 1 cannot be split evenly\n  shape   (16, 6)\n"
    )
    assert str(caught.value).endswith("\n\n... and 2 more")
    assert 10 == str(caught.value).count("cannot be split evenly")


def test_strict_makes_warnings_errors_and_leaves_notes():
    """Without `strict` a plan with warnings passes; with it, it raises; notes never do."""
    warned = plan_of([weight("d1.kernel")], {})
    noted = plan_of([weight("d1.kernel")], {"d1": (None, "model")}, global_init={("", "d1.kernel"): "why"})

    assert warned is warned.check()
    with pytest.raises(lm.PlanError, match=r"^d1\.kernel: no rule matches, so it is replicated\n"):
        warned.check(strict=True)
    assert noted is noted.check(strict=True)


def test_errors_come_first():
    """Problems are sorted by how bad they are; among equals in the order of the model, rules first."""
    plan = plan_of(
        [weight("a.kernel"), weight("b.kernel", (16, 6)), weight("c.kernel", (16, 7))],
        {r"[bc]\.": (None, "model"), "typo": (None,)},
    )

    assert ["b.kernel", "c.kernel", "typo", "a.kernel"] == [p.subject for p in plan.problems]


def test_a_pattern_with_the_sign_of_a_comment():
    """Patterns are grouped by what they have beside numbers, whatever that is."""
    plan = plan_of([], {"0.#": (None,), "0.0": (None,)})

    assert ["0.#", "0.0"] == [problem.subject for problem in merge_problems(plan.problems)]


def test_a_map_without_a_mesh():
    """Nothing can be laid out without a mesh, not even replicated."""
    with pytest.raises(lm.PlanError, match=r"^the layout map has no mesh\n"):
        make_plan([weight("d1.kernel")], lm.LayoutMap())


def test_one_more_problem():
    """A plan with one more problem is another plan, equal but for it."""
    plan = plan_of([weight("d1.kernel")], {".*": (None, "model")})
    problem = Problem("not built", "warning", "m", "m: 1 layers have no weights yet: d2")

    assert (problem,) == plan.add_problem(problem).problems
    assert () == plan.problems


@given(strategies.plans())
def test_every_variable_is_assigned_exactly_once_in_order(drawn):
    """A plan has one assignment for each variable, in the order given: what the map says, made to fit as it says."""
    variables, layout_map, plan = drawn

    assert variables == [a.variable for a in plan.assignments]
    assert len(variables) == len(plan)
    for a in plan.assignments:
        if a.variable.is_derived:
            continue
        rule = layout_map.match(a.variable.path).rule if a.variable.kind is not Kind.METRIC else None
        if rule is None:
            assert a.layout.is_fully_replicated()
        else:
            assert apply_uneven_policy(rule.layout, a.variable.shape, rule.uneven) == a.layout


@given(strategies.plans())
def test_a_derived_variable_follows_unless_a_rule_is_meant_for_it(drawn):
    """A rule is, if it matches the variable and not its parent; else each axis is sharded as those of its parent."""
    _, layout_map, plan = drawn
    for a in plan.assignments:
        v = a.variable
        if not v.is_derived:
            continue
        parent = plan[v.parent]
        of_parent = layout_map.matching_rules(v.parent)
        meant = [r for r in layout_map.matching_rules(v.path) if r not in of_parent]
        if meant and v.kind is not Kind.SLOT:
            assert apply_uneven_policy(meant[0].layout, v.shape, meant[0].uneven) == a.layout
            continue
        assert a.match is None
        if v.axes is None:
            assert parent.layout == a.layout
        elif parent.layout.rank == len(v.parent_shape):
            for axis, (of,) in enumerate(v.axes):
                asked = parent.layout.list_mesh_dims(of)
                assert set(a.layout.list_mesh_dims(axis)) <= set(asked)
                assert v.shape[axis] % parent.layout.num_shards(of) or asked == a.layout.list_mesh_dims(axis)


@given(strategies.plans())
def test_bytes_are_those_of_all_shards(drawn):
    """The devices and the host store the shards together; what does not fit is left out."""
    _, _, plan = drawn
    fitting = [a for a in plan.assignments if a.fits]

    assert sum(a.variable.global_bytes for a in plan.assignments) == plan.global_bytes
    assert sum(a.shard_bytes for a in fitting if a.layout.host_memory) == plan.host_bytes
    assert sum(a.shard_bytes for a in fitting) == plan.device_bytes + plan.host_bytes
    for a in fitting:
        size = a.layout.mesh.size
        slices = [a.layout.shard_slices(a.variable.shape, i) for i in range(size)]
        assert {a.shard_shape} == {tuple(s.stop - s.start for s in index) for index in slices}
        assert a.shard_bytes * size >= a.variable.global_bytes


@given(strategies.plans())
def test_a_plan_has_an_error_exactly_where_something_does_not_fit(drawn):
    """Each variable that does not fit its layout has an error of its own, or follows one that has; no other has one."""
    _, _, plan = drawn
    own = {a.variable.path for a in plan.assignments if not a.fits and (a.match or not a.variable.is_derived)}

    assert own == {p.subject for p in plan.errors}
    assert all(p.severity in ("error", "warning", "note") for p in plan.problems)


@given(strategies.plans())
def test_every_rule_is_used_or_reported(drawn):
    """A rule wins at least one variable, or a warning says that it is unused or shadowed."""
    _, layout_map, plan = drawn
    winners = {a.match.rule.pattern for a in plan.assignments if a.match and a.match.rule}
    told = {p.subject for p in plan.warnings if p.kind in ("unused rule", "shadowed rule")}

    assert set(layout_map) == winners | told
    assert not winners & told


@given(strategies.plans())
def test_planning_again_gives_the_same(drawn):
    """A plan depends on the variables and the map only."""
    variables, layout_map, plan = drawn

    assert make_plan(variables, layout_map) == plan
    assert isinstance(str(plan), str)
    assert isinstance(plan._repr_html_(), str)


# -- activations


def test_what_is_not_known_of_layers_is_no_problem():
    """Where layers are not told, or not all of them yet, nothing is said of activation rules."""
    layout_map = lm.LayoutMap(MESH, {"d1": (None, "model")}, {"nope": (None,)})

    assert () == make_plan([weight("d1")], layout_map).problems
    assert () == make_plan([weight("d1")], layout_map, layers=["a"], complete=False).problems


# -- rules for derived variables


def lora(path="up.lora_kernel_a", shape=(16, 8)):
    """The first factor of a kernel of (16, 64): its first axis is the kernel's, its second the rank."""
    return weight(path, shape, parent="up.kernel", axes=((0,), ()), parent_shape=(16, 64))


def test_a_rule_for_a_derived_variable_is_about_its_own_axes():
    """Also where the parent has as many: the rule counts, and an axis that does not divide is an error."""
    rules = {r"up\.kernel": ("model", None), r"up\.lora_kernel_a": (None, "model")}
    plan = plan_of([weight("up.kernel"), lora()], rules)
    uneven = plan_of([weight("up.kernel"), lora(shape=(16, 6))], rules)

    assert ("unsharded", "model") == plan["up.lora_kernel_a"].layout.sharding_specs
    assert () == plan.problems
    assert [("uneven", "error")] == [(p.kind, p.severity) for p in uneven.problems]


def test_a_rule_of_another_rank_is_reported_with_the_shape_that_it_is_for():
    """The variable's own, or that of the weight in whose place it is."""
    own = plan_of(
        [weight("up.kernel"), lora()], {r"up\.kernel": ("model", None), r"up\.lora_kernel_a": ("model",)}
    )
    packed = weight("up.kernel", (16, 32), parent="up.kernel", axes=((0,), (1, 2)), parent_shape=(16, 8, 8))
    other = plan_of([packed], {r"up\.kernel": ("model",)})

    assert [("rank", ("shape", "(16, 8)"))] == [(p.kind, p.facts[0]) for p in own.problems]
    assert [("rank", ("shape", "(16, 8, 8)"))] == [(p.kind, p.facts[0]) for p in other.problems]
    (note,) = plan_of([replace(packed, shape=(16, 2))], {"up": (None, "model", None)}).problems
    assert note.why.endswith(
        "it is sharded as its rule shards the weight that it replaces, as far as that divides it"
    )


def test_an_exact_key_beats_a_rule_that_comes_before_for_a_derived_variable_too():
    """As for any other variable, and the other is reported as one that also matches."""
    rules = {
        r"up\.kernel": ("model", None),
        r".*lora_kernel_a": (None, None),
        "up.lora_kernel_a": (None, "model"),
    }
    match = plan_of([weight("up.kernel"), lora()], rules)["up.lora_kernel_a"].match

    assert (3, [2]) == (match.rule.number, [rule.number for rule in match.others])


def test_a_character_code_in_a_rule_is_no_word():
    """With a part of the code replaced, the pattern is no regex. The correction is the whole path."""
    variables = [weight(f"{name}.kernel", (8, 8)) for name in ("u006bernal", "bernal")]
    problems = plan_of(variables, {r"\u006bernel\.kernl": (None, None)}).problems
    (unused,) = [p for p in problems if p.kind == "unused rule"]

    (corrected,) = re.findall(r'did you mean r"(.*)"', unused.fix)
    assert re.match(corrected, "bernal.kernel") or re.match(corrected, "u006bernal.kernel")
