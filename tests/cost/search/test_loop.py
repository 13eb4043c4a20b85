"""The search, on a model whose steps cost what a formula says."""

import itertools
import os
from dataclasses import replace

import pytest

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning, PlanError
from layoutmap.cost.search.built_in_maps import iterate_built_in_maps, make_built_in_map
from layoutmap.cost.search.loop import Candidate, MapCost, SearchOutcome, choose_best_candidate, search_maps
from layoutmap.cost.search.options import list_search_meshes, list_specs_with_none
from layoutmap.cost.search.result_table import compare_with_best_built_in_map, explain_recomputation
from layoutmap.cost.search.search_cache import SearchCache
from layoutmap.cost.search.space import LayoutSpace
from layoutmap.plan.planner import make_plan_table
from layoutmap.rules.presets import find_matching_preset
from layoutmap.rules.rule_set import RuleSet
from tests.cost.search.models import costs, model, variables

LIMIT = 1 << 40


MESHES = list_search_meshes(8, 16, 8)


def maps_of_experts(of, meshes=MESHES):
    return [expert for grid in meshes for expert in iterate_built_in_maps(of, grid, None)]


def run(of, evaluate=None, *, limit=LIMIT, max_maps=150, seed=0, meshes=MESHES, **options):
    return search_maps(
        of,
        maps_of_experts(of, meshes),
        evaluate or costs(of),
        max_bytes=limit,
        max_maps=max_maps,
        seed=seed,
        **options,
    )


@pytest.mark.parametrize("sizes", [(8, 1), (4, 2)])
def test_agrees_with_an_exhaustive_search(sizes):
    """On one mesh, no map of all that there are costs less than the one that is found, by half a per mille."""
    of = model()
    (grid,) = (g for g in MESHES if (g.data_dim_size, g.model_dim_size) == sizes)
    found = run(of, meshes=(grid,), max_maps=2000).best
    space, evaluate = LayoutSpace(of, grid), costs(of)
    some = itertools.islice(itertools.product(*map(range, space.num_choices)), 0, None, 97)
    assert [] == [p for p in some if evaluate(space.make_layout_map(p)).seconds < 0.9994 * found.cost.seconds]


def test_is_deterministic_for_a_seed():
    """The same seed gives the same map after as many tries; no seed gives one that is worse than an expert's."""
    of = model()
    outcomes = [run(of, max_maps=80, seed=seed) for seed in (0, 0, 1)]
    assert outcomes[0] == outcomes[1]
    assert [True] * 3 == [
        o.best.ranking_key <= o.built_in_maps[0].ranking_key and o.num_tried <= 80 for o in outcomes
    ]


def test_the_memory_limit_holds():
    """What is found needs at most the limit, wherever any map does."""
    of = model()
    free = run(of)
    limit = int(1.3 * min(expert.cost.peak_bytes for expert in free.built_in_maps))
    tight = run(of, limit=limit)
    assert tight.best.cost.peak_bytes <= limit
    assert free.best.cost.seconds <= tight.best.cost.seconds


def test_where_nothing_fits_the_error_says_what_came_nearest():
    """An error names the limit, the nearest map's mesh and bytes, and what is missing."""
    with pytest.raises(PlanError) as caught:
        run(model(), limit=1000, max_maps=20)
    assert caught.value.what == "search: no layout map fits the memory"
    assert list(caught.value.facts) == ["limit", "nearest", "missing", "maps tried"]


def test_kept_rules_are_in_every_map():
    """A kept rule stands first, decides for what it matches, and no map that is tried is without it."""
    grid = MESHES[2]
    start = RuleSet(grid.mesh, {r".*\.up\.kernel$": ("model", None), r".*\.down\.kernel$": ("model", None)})
    kept = RuleSet(
        grid.mesh, {r".*\.up\.kernel$": ("model", None)}, activations={r"blocks\.\d+": (None,) * 3}
    )
    of, tried = model(kept), []

    def evaluate(layout_map):
        tried.append(layout_map)
        return costs(of)(layout_map)

    own = [*iterate_built_in_maps(of, grid, None), make_built_in_map("start", of, grid, start)]
    found = search_maps(of, own, evaluate, max_bytes=LIMIT, max_maps=100).best.layout_map
    assert (r".*\.up\.kernel$", "blocks\\.\\d+") == (next(iter(found)), next(iter(found.activations)))
    with_kept = [m for m in tried if m != start]
    assert {("model", "unsharded")} == {m["blocks.1.mlp.up.kernel"].sharding_specs for m in with_kept}


def test_the_written_rules_give_the_layouts_that_were_chosen():
    """Planning with the rules of a point gives each group just its specs, with nothing to warn of."""
    of = model()
    for grid in MESHES:
        for tied in (True, False):
            space = LayoutSpace(of, grid, tie_similar=tied)
            for point in itertools.islice(itertools.product(*map(range, space.num_choices)), 0, None, 2003):
                layouts, _ = space.get_layouts_of_point(point)
                table = make_plan_table(
                    of.variables, space.make_layout_map(point), layers=[f"blocks.{n}" for n in range(2)]
                )
                got = {g: {list_specs_with_none(table[p].layout) for p in g.paths} for g in layouts}
                assert {g: {specs} for g, specs in layouts.items()} == got
                assert () == table.problems


def test_an_interrupt_gives_the_best_so_far():
    """After Ctrl-C the best of the maps that were tried is returned; before any, the interrupt goes on."""
    of, count = model(), itertools.count()

    def evaluate(layout_map):
        if next(count) == 5:
            raise KeyboardInterrupt
        return costs(of)(layout_map)

    outcome = run(of, evaluate)
    assert (5, False) == (outcome.num_tried, outcome.is_complete)
    with pytest.raises(KeyboardInterrupt):
        search_maps(of, maps_of_experts(of), interrupt, max_bytes=LIMIT, max_maps=9)


def interrupt(_):
    raise KeyboardInterrupt


def test_the_verdict_is_honest():
    """Where all maps cost the same, the verdict says that they tie; where what was found is faster, by how much."""
    of = model()
    said = compare_with_best_built_in_map(run(of, lambda _: MapCost(1.0, 10), max_maps=60))
    assert said.startswith("ties with") or said.endswith("No searched map beat the built-in ones")
    best = run(of)
    gain = 1 - best.best.cost.seconds / best.built_in_maps[0].cost.seconds
    assert compare_with_best_built_in_map(best).startswith(f"{100 * gain:.0f} % faster than") or gain < 0.01


def test_ties_go_to_less_memory_and_then_to_fewer_rules():
    """Of maps whose times differ by less than 1 % the least memory decides, and within 1 % of that the fewest rules."""

    def tried(name, seconds, peak, num_rules):
        rules = {f"layer_{n}": ("data",) for n in range(num_rules)}
        return Candidate(name, RuleSet("data=8", rules), MapCost(seconds, peak), 2000)

    small, plain = tried("small", 1.009, 700, 9), tried("plain", 1.009, 705, 2)
    fast, slow = tried("fast", 1.0, 900, 1), tried("slow", 1.02, 100, 0)
    large = tried("large", 0.5, 2001, 0)  # does not fit
    assert plain is choose_best_candidate([fast, small, plain, slow, large])
    assert (small, fast) == (choose_best_candidate([fast, small]), choose_best_candidate([fast, slow]))
    assert slow is choose_best_candidate([slow, large])
    assert large is choose_best_candidate([large])
    assert "and this one takes 22 % less memory" in compare_with_best_built_in_map(
        SearchOutcome(plain, (fast, slow), frozenset("ab"), True)
    )


def test_a_map_that_is_counted_again_with_recomputing_is_one_map():
    """The result has the number of different maps, as the last line of progress has."""
    of, asked, shown = model(), [], []
    formula = costs(of)

    def count(layout_map):
        asked.append(layout_map.to_yaml())
        return replace(formula(layout_map), peak_bytes=LIMIT + 1)

    def count_again(layout_map):
        asked.append(layout_map.to_yaml())
        return formula(layout_map)

    found = run(
        of, count, evaluate_remat=count_again, max_maps=20, on_tried=lambda number, best: shown.append(number)
    )

    assert len({*asked}) == found.num_tried == shown[-1] < len(asked)


def test_activations_are_recomputed_only_where_that_helps():
    """If nothing fits, or what does not fit would be faster; not for less than 1 %."""
    of, formula = model(), costs(model())

    def way(times=1.0, more=0):
        return lambda m: replace(
            (found := formula(m)), seconds=times * found.seconds, peak_bytes=found.peak_bytes + more
        )

    def large_if_replicated(layout_map):
        return (
            replace(formula(layout_map), seconds=1e-6, peak_bytes=LIMIT + 1)
            if not layout_map
            else formula(layout_map)
        )

    small = 2 * min(expert.cost.peak_bytes for expert in run(of, max_maps=20).built_in_maps)
    needed = run(of, way(more=10 * small), evaluate_remat=way(1.3), limit=small, max_maps=40)
    faster = run(of, large_if_replicated, evaluate_remat=way(0.5), max_maps=40)
    others = [
        run(of, way(), evaluate_remat=way(0.5), max_maps=40),
        run(of, large_if_replicated, evaluate_remat=way(0.995), max_maps=40),
    ]
    outcomes = [needed, faster, *others]
    assert [True, True, False, False] == [o.best.recomputes for o in outcomes]
    # Memory lacks by far: only experts' maps are tried without
    assert needed.num_tried <= len(needed.built_in_maps) + 40
    texts = [explain_recomputation(o, "h.{0..1}", "How.").partition("without that ")[2] for o in outcomes]
    assert ["no map fits", "the best map", "", ""] == [
        " ".join(text.split()[:3]).rstrip(",") for text in texts
    ]


def test_a_search_begun_again_asks_for_nothing(tmp_path):
    """With a file of figures, a second search counts nothing and finds the same; another fingerprint counts anew."""
    of, asked = model(), []

    def evaluate(layout_map):
        asked.append(layout_map)
        return costs(of)(layout_map)

    def kept_run(fingerprint):
        file = SearchCache(tmp_path / "figures.json")
        found = run(of, file.wrap_with_cache(evaluate, fingerprint), max_maps=60).best.layout_map
        file.write_file()
        return found, len(asked)

    first, second, other = kept_run("a"), kept_run("a"), kept_run("b")
    assert first == second
    assert (other[0], other[1]) == (first[0], 2 * first[1])


def test_a_file_that_keeps_no_figures_is_refused_and_stays(tmp_path):
    """Of another program, of figures that are none, a pipe, in no folder: before a model is made, with a fix."""
    os.mkfifo(tmp_path / "pipe")
    for name, text in (
        ("other.json", '{"version": 2}'),
        ("broken.json", '{"version": 1, "figures": {"a": 3}}'),
        ("text.json", "no JSON"),
        ("texts.json", '{"version": 1, "figures": {"a": {"b": ["x", 1, 2]}}}'),
    ):
        (tmp_path / name).write_text(text)
    for name in ("other.json", "broken.json", "text.json", "texts.json", "pipe", "none/figures.json"):
        with pytest.raises(
            LayoutMapError, match=f"{name} (was not written by a search|cannot be written)"
        ) as caught:
            SearchCache(tmp_path / name)
        assert caught.value.why
        assert "cache=" in caught.value.fix
    assert "no JSON" == (tmp_path / "text.json").read_text()


def test_figures_that_cannot_be_written_are_a_warning(tmp_path):
    """What was found counts more; nothing half written is left."""
    (tmp_path / "folder").mkdir()
    file = SearchCache(tmp_path / "folder" / "figures.json")
    (tmp_path / "folder").rmdir()
    with pytest.warns(LayoutMapWarning, match="the costs that the search has computed cannot be stored"):
        file.write_file()
    assert [] == list(tmp_path.iterdir())


def test_no_preset_is_for_a_model_that_it_does_not_know():
    """A preset fits only if it has a rule for each weight."""
    assert find_matching_preset([group.paths[0] for group in model().groups]) is None
    assert len(variables()) == len({path for group in model().groups for path in group.paths})
