"""The page of a plan in a real browser: search, sort, filter, choose, and slices that are those of `Layout`."""

import functools
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from urllib.parse import urlencode

import costs
import numpy as np
import pytest
from browsers import opened
from cases import examples, few
from checkpoints import saved
from hypothesis import given, settings
from hypothesis import strategies as st
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

import layoutmap as lm
from layoutmap.cli.main import main
from layoutmap.core.paths import format_merged_paths
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.cost.table import Collective
from layoutmap.plan.completeness import find_unbuilt_layers_problem, make_unbuilt_layers_problem
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies

MESH = lm.Mesh(None, "stage=2,batch=2,model=4")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests of this file."""
    with opened(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def no_complaints(browser):
    """A test leaves nothing in the browser's console: no error of a script, nothing that the policy stopped."""
    yield
    assert [] == browser.get_log("browser")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def open_page(browser):
    """Open a page, with the answers of a reader in its address, and wait until it is drawn."""

    def open_page(path, **fragment):
        browser.get("about:blank")
        browser.get(f"{path.as_uri()}#{urlencode(fragment)}")
        browser.execute_async_script(
            """const [done] = arguments;
            const ask = () => performance.getEntriesByName("drawn").length ? done() : setTimeout(ask, 5);
            ask();"""
        )

    return open_page


@pytest.fixture(scope="module")
def show(open_page, folder):
    """Open the page of a plan, with the answers of a reader in its address."""
    path = folder / "plan.html"
    written = {}

    def show(plan, **fragment):
        if written.get("plan") != plan:
            path.write_text(plan.to_html(), encoding="utf-8")
            written["plan"] = plan
        open_page(path, **fragment)

    return show


@pytest.fixture(scope="module")
def compute(browser, show):
    """Run a script among those of a page, whichever page is open."""
    show(PLAN)
    return browser.execute_script


def transformer():
    """Three blocks, an odd head, what no rule matches, a tied weight, and slots."""
    variables = [VariableSpec("embed.table", (96, 32), "float32", aliases=("head.tied",))]
    for i in range(3):
        variables += [
            VariableSpec(f"blocks.{i}.attn.query.kernel", (32, 8, 4), "bfloat16"),
            VariableSpec(f"blocks.{i}.up.kernel", (32, 64), "float32"),
            VariableSpec(f"blocks.{i}.up.bias", (64,), "float32"),
        ]
    variables += [
        VariableSpec("head.kernel", (30, 7), "float32"),
        VariableSpec("norm.moving_mean", (16,), "float32", Kind.STATE),
        VariableSpec("temperature", (), "float32"),
    ]
    variables += [
        VariableSpec(f"optimizer.{v.path}.momentum", v.shape, "float32", Kind.SLOT, parent=v.path)
        for v in variables[:10]
    ]
    rules = {
        r".*query\.kernel": ("batch", "model", None),
        r".*up\.kernel": (None, ("model", "batch")),
        r"head\.kernel": (None, "model"),
        r"embed\.": ("model", None),
    }
    global_init = {("", "embed.table"): "it is drawn by a function of one's own"}
    return make_plan(variables, lm.LayoutMap(MESH, rules), global_init=global_init)


PLAN = transformer()


@functools.cache
def large():
    """1,500 variables and as many slots on 4,096 devices."""
    variables = [
        VariableSpec(f"layer_{i}.{name}.kernel", (4096, 32, 128), "bfloat16")
        for i in range(250)
        for name in ("query", "key", "value", "output", "gate", "up")
    ]
    variables += [
        VariableSpec(f"optimizer.{v.path}.m", v.shape, "float32", Kind.SLOT, parent=v.path) for v in variables
    ]
    mesh = lm.Mesh(None, "batch=256,model=16")
    return make_plan(variables, lm.LayoutMap(mesh, {".*(query|key)": ("batch", "model", None)}))


def find(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def text(browser, selector):
    return find(browser, selector).text


def rows(browser):
    """The paths in the table, from top to bottom, as far as they are in the document."""
    return browser.execute_script(
        "return [...document.querySelectorAll('#grid td:first-child .clamped')].map((cell) => cell.title)"
    )


def chosen(browser):
    return browser.execute_script("return document.getElementById('chosen-path').textContent")


def search(browser, words):
    box = find(browser, "#search")
    box.clear()
    box.send_keys(words)


def press(browser, words):
    """Press the button with these words."""
    # One script finds it: to ask each button of a page takes a second.
    (button,) = browser.execute_script(
        """return [...document.querySelectorAll("button")].filter(
            (button) => button.checkVisibility() && button.innerText.trim().startsWith(arguments[0]))""",
        words,
    )
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()


def click_at(browser, selector, across, down):
    """Click a canvas somewhere, told as parts of its width and height from the left and the top."""
    canvas = find(browser, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    x, y = (across - 0.5) * canvas.size["width"], (down - 0.5) * canvas.size["height"]
    ActionChains(browser).move_to_element_with_offset(canvas, int(x), int(y)).click().perform()


def drawn_slices(browser):
    """What the page says that the chosen device or slice is: `[0:16, 4:8]`."""
    return re.search(r"(?:holds|is) (\[.*?\]|all of it)", text(browser, "#slices-readout"))[1]


def slices_text(slices):
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in slices)}]" if slices else "all of it"


def test_the_page_loads_nothing_and_tells_the_plan(browser, show):
    """Not one request; the head has the totals and the number of problems."""
    show(PLAN)

    assert [] == browser.execute_script("return performance.getEntriesByType('resource')")
    assert f"{len(PLAN)} variables on stage=2, batch=2, model=4" == text(browser, "h1")
    found = [p for p in PLAN.lint().problems if p not in PLAN.problems]
    notes = sum(p.severity == "note" for p in PLAN.problems)
    counts = f"{len(PLAN.errors)} error, {len(PLAN.warnings)} warnings, {notes} note, {len(found)} findings"
    assert f"Problems {counts} of lint" == text(browser, "#problems-heading")
    assert "Each of the 16 devices holds " in text(browser, "#memory")
    assert "1 variable that does not fit its layout is not counted" in text(browser, "#memory")


def test_the_policy_holds(browser, show):
    """Even a script of the page itself can load nothing: the browser refuses, and says that the policy does."""
    show(PLAN)
    told = browser.execute_async_script(
        "const [done] = arguments; fetch('data:,text').then(() => done('loaded'), () => done('refused'));"
    )
    complaints = " ".join(entry["message"] for entry in browser.get_log("browser"))

    assert "refused" == told
    assert "Content Security Policy" in complaints


def test_search(browser, show):
    """Text anywhere in a path, an alias or a rule's pattern; a regex between slashes; a wrong regex is reported."""
    show(PLAN)
    for words, found in {
        "UP.bias": ["blocks.{0..2}.up.bias", "optimizer.*.momentum"],
        "tied": ["embed.table"],
        r"query\.kernel": ["blocks.{0..2}.attn.query.kernel"],
        "/^blocks.[02].up.k/": ["blocks.{0..2}.up.kernel"],
        "/^HEAD.KERNEL$/i": ["head.kernel"],
        "blocks.1.up.kernel": ["blocks.1.up.kernel", "optimizer.blocks.1.up.kernel.momentum"],
        "nothing like it": [],
    }.items():
        search(browser, words)
        assert found == rows(browser), words

    search(browser, "/(/")
    assert "This is not a regex" in text(browser, "#hits")
    assert "true" == find(browser, "#search").get_attribute("aria-invalid")


SORTED_BY = {
    "variable": lambda a: a.variable.path,
    "global": lambda a: a.variable.global_bytes,
    "per device": lambda a: a.shard_bytes if a.fits else 0,
    "dtype": lambda a: a.variable.dtype,
}


@pytest.mark.parametrize("column", few(SORTED_BY, "variable", "per device"))
def test_sort(browser, show, column):
    """A column's head sorts up, then down, then as the model has it; equal ones keep the model's order."""
    show(PLAN, all=1)
    in_order = PLAN.assignments
    for wanted in (
        sorted(in_order, key=SORTED_BY[column]),
        sorted(in_order, key=SORTED_BY[column], reverse=True),
        in_order,
    ):
        head = find(browser, f"#grid th:nth-child({1 + headings(browser).index(column)}) button")
        head.click()
        assert [a.variable.path for a in wanted][:20] == rows(browser)[:20]


def headings(browser):
    heads = browser.execute_script(
        "return [...document.querySelectorAll('#grid th button')].map((head) => head.innerText)"
    )
    return [head.split(" ↑")[0] for head in heads]


FILTERS = {
    "no rule": lambda a: a.match is not None and a.match.rule is None and a.variable.kind != Kind.SLOT,
    "replicated": lambda a: a.fits and a.layout.is_fully_replicated(),
    "uneven": lambda a: not a.fits,
    "global init": lambda a: bool(a.global_init),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters(browser, show, name):
    """Each button leaves the variables that Python says are so, and its tally counts them."""
    show(PLAN, all=1)
    wanted = [a.variable.path for a in PLAN.assignments if FILTERS[name](a)]
    press(browser, name)

    assert wanted == rows(browser)
    assert f"{len(wanted)} of {len(PLAN)} variables" == text(browser, "#hits")
    press(browser, "Clear")
    assert f"{len(PLAN)} of {len(PLAN)} variables" == text(browser, "#hits")


def test_repeated_blocks_are_one_row_or_many(browser, show):
    """As in the terminal, and with the box unchecked each for itself."""
    show(PLAN)
    assert "blocks.{0..2}.up.kernel" in rows(browser)
    find(browser, "#collapsed").click()

    assert {f"blocks.{i}.up.kernel" for i in range(3)} < set(rows(browser))


def test_a_click_on_a_row_draws_the_variable(browser, show):
    """Its name, its rule and its slices stand beside the table, and the address says it."""
    show(PLAN, all=1)
    search(browser, "blocks.1.up.kernel")
    find(browser, "#row-0").click()

    assert "blocks.1.up.kernel" == chosen(browser)
    assert "8 slices of 1.0 KiB, each held by 2 devices." in text(browser, "#slices-readout")
    assert "axis 1: 64 over model, then batch, 8 shards of 8" in text(browser, "#slices-legend")
    assert r"rule 2 .*up\.kernel" in text(browser, "#details")
    in_address = "search=blocks.1.up.kernel", "variable=blocks.1.up.kernel"
    WebDriverWait(browser, 10).until(lambda _: all(each in browser.current_url for each in in_address))


def test_the_address_brings_all_of_it_back(browser, show):
    """The variable, the device, the search, the filter and the order."""
    fragment = {
        "variable": "blocks.2.up.bias",
        "device": 5,
        "search": "up",
        "kind": "weight",
        "sort": "global",
        "down": 1,
    }
    show(PLAN, **fragment)

    assert "blocks.2.up.bias" == chosen(browser)
    assert "5" == find(browser, "#device").get_attribute("value")
    assert ["blocks.{0..2}.up.kernel", "blocks.{0..2}.up.bias"] == rows(browser)
    assert "true" == find(browser, "#row-1").get_attribute("aria-selected")


def test_a_click_on_a_tile_chooses_its_variable(browser, show):
    """A tile of the treemap, and the name of a module zooms in and out again."""
    show(PLAN)
    before = chosen(browser)
    click_at(browser, "#treemap-canvas", 0.97, 0.3)
    assert before != chosen(browser)
    assert chosen(browser) in text(browser, "#treemap-readout")
    assert PLAN[chosen(browser)]

    show(PLAN, variable="blocks.1.up.kernel")
    canvas = find(browser, "#treemap-canvas")
    canvas.send_keys("z")
    assert "blocks.{0..2}" == text(browser, ".crumbs [aria-current]")
    canvas.send_keys(Keys.ESCAPE)
    assert f"All {len(PLAN)} variables" == text(browser, ".crumbs [aria-current]")
    press(browser, "Bytes of the whole model")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ENTER)
    assert chosen(browser) in text(browser, "#treemap-readout")


@pytest.mark.parametrize(
    "path",
    few(
        ["temperature", "blocks.0.up.bias", "blocks.0.up.kernel", "blocks.0.attn.query.kernel"],
        *("temperature", "blocks.0.attn.query.kernel"),
    ),
)
def test_a_device_tells_its_slice_and_a_slice_its_devices(browser, show, path):
    """Of any rank: a click on the mesh gives the slice of Python's arithmetic, and a click on a slice its devices."""
    show(PLAN, variable=path)
    a = PLAN[path]
    click_at(browser, "#mesh-canvas", 0.03, 0.9)
    device = int(find(browser, "#device").get_attribute("value"))
    assert slices_text(a.layout.shard_slices(a.variable.shape, device)) == drawn_slices(browser)

    click_at(browser, "#slices-canvas", 0.99, 0.95)
    assert "" == find(browser, "#device").get_attribute("value")
    last = tuple(count - 1 for count in a.layout.shard_counts)
    holders = [i for i in range(MESH.size) if a.layout.locate_shard(i) == last]
    assert slices_text(a.layout.shard_slices(a.variable.shape, holders[0])) == drawn_slices(browser)
    if len(holders) <= 8:
        assert f"devices {', '.join(map(str, holders))}:" in text(browser, "#slices-readout")


@given(st.data())
@settings(max_examples=examples(150))
def test_the_arithmetic_of_the_page_is_that_of_layout(compute, data):
    """For every device of any mesh and layout: which shard, from where to where, and who else holds it."""
    mesh = data.draw(strategies.meshes())
    layout = data.draw(strategies.layouts(mesh))
    shape = data.draw(strategies.shapes(layout, min_side=0))
    specs = [
        [mesh.dim_names.index(dim) for dim in layout.list_mesh_dims(axis)] for axis in range(layout.rank)
    ]
    offsets = layout.offset_to_shard()
    told = compute(
        """const [sizes, specs, shape, size] = arguments;
        return [...Array(size).keys()].map((device) => {
          const offset = layoutmap.shardOffset(sizes, specs, device);
          const slices = layoutmap.slicesOf(layoutmap.shardCounts(sizes, specs), shape, offset);
          const weights = layoutmap.shardWeights(sizes, specs);
          return [offset, slices, layoutmap.devicesOf(sizes, specs, offset), weights];
        });""",
        mesh.shape,
        specs,
        shape,
        mesh.size,
    )

    assert [
        [
            list(offset),
            [[part.start, part.stop] for part in layout.shard_slices(shape, device)],
            [i for i, other in enumerate(offsets) if other == offset],
        ]
        for device, offset in enumerate(offsets)
    ] == [each[:3] for each in told]
    # What the mesh is coloured by: the number of a device's shard is a sum over its coordinates.
    assert [layout.offset_tuple_to_global_index(offset) for offset in offsets] == [
        sum(at * weight for at, weight in zip(mesh.coords(device), told[device][3], strict=True))
        for device in range(mesh.size)
    ]


@given(strategies.meshes(max_size=64), st.integers(60, 1500), st.data())
@settings(max_examples=examples(60))
def test_every_device_has_a_cell_of_its_own(compute, mesh, width, data):
    """Whichever dims go down and across, in any width: its cell is in the drawing, and what is there is that device."""
    dims = [*range(len(mesh.shape)), None]
    across = data.draw(st.sampled_from(dims))
    down = data.draw(st.sampled_from([dim for dim in dims if dim is None or dim != across]))
    told = compute(
        """const [names, sizes, down, across, width, size] = arguments;
        const tiles = new layoutmap.MeshTiles({ names, sizes }, down, across, width, 300);
        return [...Array(size).keys()].map((device) => {
          const [x, y] = tiles.placeOf(device);
          const inside = x >= 0 && y >= 0 && x + tiles.cell <= width && y + tiles.cell <= tiles.height + 1;
          return [inside, tiles.deviceAt(x + tiles.cell / 2, y + tiles.cell / 2)];
        });""",
        mesh.dim_names,
        mesh.shape,
        down,
        across,
        width,
        mesh.size,
    )

    assert [[True, device] for device in range(mesh.size)] == told


@given(st.lists(st.integers(0, 10**12), max_size=30), st.integers(1, 900), st.integers(1, 900))
@settings(max_examples=examples(60))
def test_tiles_are_as_large_as_what_they_stand_for(compute, weights, width, height):
    """Each has its share of the area, and all lie side by side in the rectangle."""
    told = compute(
        """const placed = [];
        layoutmap.squarify(arguments[0].map((weight) => ({ weight })), 0, 0, arguments[1], arguments[2],
          (item, ...box) => placed.push([item.weight, ...box]));
        return placed;""",
        weights,
        width,
        height,
    )
    total = sum(weights)

    assert sorted(weight for weight in weights if weight) == sorted(weight for weight, *_ in told)
    for weight, x, y, wide, high in told:
        assert wide * high == pytest.approx(width * height * weight / total)
        assert -1e-6 <= x <= x + wide <= width * (1 + 1e-6)
        assert -1e-6 <= y <= y + high <= height * (1 + 1e-6)
    boxes = [box for _, *box in told]
    for i, (x, y, wide, high) in enumerate(boxes):
        for x2, y2, wide2, high2 in boxes[:i]:
            apart_x, apart_y = max(x, x2) - min(x + wide, x2 + wide2), max(y, y2) - min(y + high, y2 + high2)
            assert max(apart_x, apart_y) >= -1e-6


@given(
    strategies.paths(),
    st.lists(st.lists(st.integers(0, 40) | st.just(10**20), min_size=6, max_size=6), min_size=1, max_size=6),
)
@settings(max_examples=examples(60))
def test_paths_are_merged_as_in_the_terminal(compute, path, numbers):
    """Those of repeated blocks, in which only numbers differ."""
    words = re.split(r"\d+", path)
    paths = ["".join(word + str(n) for word, n in zip(words, each, strict=False)) for each in numbers]

    assert format_merged_paths(paths) == compute("return layoutmap.mergedPath(arguments[0])", paths)


@given(st.data())
@settings(max_examples=examples(15))
def test_what_the_page_says_of_a_device_is_what_it_holds(browser, show, data):
    """From a plan to the text below the drawing, on any mesh, of any rank."""
    layout = data.draw(strategies.layouts())
    shape = data.draw(strategies.shapes(layout))
    device = data.draw(st.integers(0, layout.mesh.size - 1))
    plan = make_plan([VariableSpec("k", shape, "float32")], lm.LayoutMap(layout.mesh, {"k": layout}))
    show(plan, device=device)

    assert slices_text(layout.shard_slices(shape, device)) == drawn_slices(browser)


def test_a_variable_of_three_axes_is_drawn_by_two_of_them(browser, show):
    """Another axis can be drawn, and the shard along an axis that is not drawn is chosen by number."""
    show(PLAN, variable="blocks.0.attn.query.kernel", device=15)
    select = find(browser, "#slices-axis-0")
    assert "axis 0 (32)" in select.text
    select.send_keys(Keys.END)
    assert "down, axis 2: 4, unsharded" in text(browser, "#slices-legend")
    assert "[16:32, 6:8, 0:4]" == drawn_slices(browser)

    shard = find(browser, "#slices input[type=number]")
    shard.clear()
    shard.send_keys("0", Keys.TAB)
    assert "[0:16, 6:8, 0:4]" == drawn_slices(browser)


def test_what_does_not_fit_says_so(browser, show):
    """It has no slices, and its problem stands with it and leads to it."""
    show(PLAN)
    find(browser, "#problems .error .link").click()

    assert "head.kernel" == chosen(browser)
    assert "does not fit its layout" in text(browser, "#slices-readout")
    assert "7 is not a multiple of 4" in text(browser, "#details")


def test_variables_without_a_rule_are_reported_as_one(browser, show):
    """As in the terminal: how many, what to type for each, and a way to each."""
    show(PLAN)
    found = [p for p in PLAN.problems if p.kind == "no rule"]
    told = [node.text for node in browser.find_elements(By.CSS_SELECTOR, "#problems .warning")]

    assert [f"warning no rule matches these {len(found)}, so they are replicated;"] == [
        each.partition(" add rules")[0] for each in told if "no rule matches" in each
    ]
    assert r"""add a rule: layout_map[r"blocks\.\d+\.up\.bias$"] = ('model',)""" in "".join(told)
    find(browser, "#problems .listed .link").click()
    assert "blocks.0.up.bias" == chosen(browser)


def test_the_keyboard_is_enough(browser, show):
    """The table, the slices and the mesh each take the focus, and arrows and Enter choose."""
    show(PLAN)
    grid = find(browser, "#grid")
    grid.send_keys(Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    assert "blocks.0.up.kernel" == chosen(browser)

    find(browser, "#slices-canvas").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "[0:32, 8:16]" == drawn_slices(browser)
    find(browser, "#mesh-canvas").send_keys(Keys.ARROW_RIGHT, Keys.PAGE_DOWN, Keys.ENTER)
    device = int(find(browser, "#device").get_attribute("value"))
    a = PLAN["blocks.0.up.kernel"]
    assert slices_text(a.layout.shard_slices(a.variable.shape, device)) == drawn_slices(browser)
    find(browser, "#mesh-canvas").send_keys(Keys.ESCAPE)
    assert "" == find(browser, "#device").get_attribute("value")


def test_a_device_of_another_size(browser, show):
    """The reader says how much memory a device has, and the page what would be left or missing: no second verdict."""
    show(large())
    assert "Type how much memory a device has." == text(browser, "#what-if")
    needed = large().memory.total
    for more, answer in ((1, "1.0 GiB would be left for activations."), (-0.5, "512.0 MiB are missing")):
        box = find(browser, "#budget")
        box.clear()
        box.send_keys(f"{needed / 2**30 + more}")
        assert answer in text(browser, "#what-if")


def verdict_on_the_page(browser):
    """What the page's first panel says, and the mood in which it does."""
    panel = find(browser, "#verdict-panel")
    text = browser.execute_script("return document.getElementById('headline').textContent")
    return text, panel.get_attribute("class")


@st.composite
def gates(draw):
    """A plan that was drawn, complete or not, with or without a cost, and what it is asked on the command line."""
    plan = draw(strategies.plans(layers=True))[2]
    if draw(st.integers(0, 3)) == 0:
        plan = costs.plan(peak_bytes=draw(st.integers(1, 2**38)))
    if draw(st.integers(0, 3)) == 0:
        plan = plan.add_problem(make_unbuilt_layers_problem("Net", ["up", "down"], called=False))
    options = draw(st.lists(st.sampled_from(["--strict", "--partial"]), unique=True))
    memory = draw(st.none() | st.sampled_from([1, plan.verdict.needed_bytes - 1, plan.verdict.needed_bytes]))
    return plan, options + (["--device-memory", f"{memory / 1000:.3f}KB"] if memory and memory > 0 else [])


@settings(max_examples=examples(25))
@given(gates())
def test_the_page_and_the_exit_code_say_one_thing(browser, open_page, folder, drawn):
    """The page's first line is the terminal's first and last one, and the JSON's; it is red where the code is 1."""
    plan, options = drawn
    page, again = folder / "page.html", folder / "again.json"
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    for file in (page, again):
        file.unlink(missing_ok=True)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        code = main(["plan", str(folder / "plan.json"), "--html", str(page), "--json", str(again), *options])
    lines = out.getvalue().splitlines()
    if find_unbuilt_layers_problem(plan) and "--partial" not in options:
        assert (2, [], False, False) == (code, lines, page.exists(), again.exists())
        return

    open_page(page)
    says, mood = verdict_on_the_page(browser)
    judged = lm.Plan.from_json(again.read_text(encoding="utf-8"))
    assert f"Verdict: {says}" == lines[0] == lines[-1]
    assert says == judged.verdict.headline == json.loads(again.read_text(encoding="utf-8"))["verdict"]["says"]
    assert (code == 1) == (mood == "bad")
    assert (code == 0) == (mood in ("well", "doubt"))
    if find_unbuilt_layers_problem(plan) or plan.errors:
        assert mood != "well"
        assert "fits" not in says
    assert says.count("fits") == (judged.verdict.fits is True)
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#verdict .advice li')].map((each) => each.firstChild.textContent)"
    )
    assert [each.format_headline(judged.verdict.available_bytes) for each in judged.verdict.advice] == shown


def test_light_and_dark(browser, show):
    """The system's choice, until the button says otherwise."""
    try:
        for scheme in ("light", "dark"):
            feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
            show(PLAN)
            seen = [ground(browser)]
            find(browser, "#theme").click()
            seen.append(ground(browser))
            assert ([True, False] if scheme == "dark" else [False, True]) == [
                sum(each) < 200 for each in seen
            ]
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def ground(browser):
    """The colour behind everything, as red, green and blue."""
    shown = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    return [int(part) for part in re.findall(r"\d+", shown)[:3]]


@functools.cache
def costly():
    """A plan with a cost whose causes have names longer than a line."""
    cause = (
        "backbone.transformer_layer_0.decoder_block.self_attention_layer.grouped_query_attention.output_dense"
    )
    found = [
        Collective(kind, ("data",), 32, 2**28, cause, phase)
        for kind in ("all_reduce", "reduce_scatter")
        for phase in ("forward", "backward")
    ]
    return costs.plan(found=found)


@pytest.mark.parametrize("width", few([390, 1100, 1280, 2200], 390, 1280))
def test_nothing_scrolls_sideways_but_the_tables(browser, show, width):
    """On a phone, on a wide screen, and between; and what travels in a step is seen whole, its cause and its phase."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        for plan in (PLAN, large(), costly()):
            show(plan)
            if plan.cost:
                cut = browser.execute_script(
                    """const right = document.getElementById("cost").getBoundingClientRect().right;
                    return [...document.querySelectorAll("#cost tbody *")].filter((part) =>
                        part.getBoundingClientRect().right > right + 1 || part.scrollWidth > part.clientWidth + 1 &&
                        getComputedStyle(part).overflow !== "visible").map((part) => part.textContent)"""
                )
                assert [] == cut
            wide, room = browser.execute_script(
                "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
            )
            assert room == wide
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_is_in_the_order_of_the_questions(browser, show):
    """Does it work, what is wrong, what takes the memory, what takes the time, and where is each variable?"""
    show(costs.plan(rules={"tokens": ("model", None)}, peak_bytes=90 * 2**30))
    seen = browser.execute_script(
        "return [...document.querySelectorAll('main .stream h2, #verdict-heading')].filter((each) => "
        "each.checkVisibility()).map((each) => each.firstChild.textContent)"
    )

    first = [
        "Verdict",
        "Problems",
        "Memory of a device",
        "A training step",
        "Where the bytes are",
        "Variables",
    ]
    assert first == seen[:6]
    assert find(browser, "#verdict-panel").location["y"] < find(browser, "#totals").location["y"]
    assert (
        "does not fit: 90.0 GiB of 79.1 GiB per device, at the peak of a step; "
        in verdict_on_the_page(browser)[0]
    )
    assert "because of" in text(browser, "#verdict")
    assert "Of 79.1 GiB, 10.9 GiB are missing." == text(browser, "#what-if")


def test_a_large_plan_is_searched_sorted_and_chosen(browser, show):
    """3,000 variables on 4,096 devices: a table of which only what is seen is in the document, down to its end."""
    plan = large()
    show(plan, all=1)
    assert "3,000 of 3,000 variables" == text(browser, "#hits")
    assert len(rows(browser)) < 60
    find(browser, "#grid").send_keys(Keys.END, Keys.ENTER)
    assert "optimizer.layer_249.up.kernel.m" == rows(browser)[-1] == chosen(browser)

    search(browser, "layer_77.key")
    assert ["layer_77.key.kernel", "optimizer.layer_77.key.kernel.m"] == rows(browser)
    find(browser, "#row-0").click()
    device = find(browser, "#device")
    device.send_keys("4001", Keys.TAB)
    wanted = plan["layer_77.key.kernel"].layout.shard_slices((4096, 32, 128), 4001)
    assert slices_text(wanted) == drawn_slices(browser)


def test_plans_of_next_to_nothing(browser, show):
    """No variable, no mesh dim, an axis without elements: all is drawn, and nothing complains."""
    one = lm.Mesh(None, [])
    show(make_plan([], lm.LayoutMap(one)))
    assert "0 variables on one device" == text(browser, "h1")
    show(make_plan([VariableSpec("k", (), "float32")], lm.LayoutMap(one)), device=0)
    assert "all of it" == drawn_slices(browser)
    show(
        make_plan([VariableSpec("k", (0, 3), "float32")], lm.LayoutMap(MESH, {"k": ("batch", None)})),
        device=9,
    )
    assert "[0:0, 0:3]" == drawn_slices(browser)


def test_layers_whose_output_is_laid_out_are_reported(browser, show):
    """In a table of their own."""
    layout_map = lm.LayoutMap(MESH, {"k": (None,)}, {r"blocks\.\d+$": ("batch", None)})
    show(make_plan([VariableSpec("k", (4,), "float32")], layout_map, layers=["blocks.0", "blocks.1"]))

    assert "blocks.{0..1} 2 (batch, unsharded) 1" in text(browser, "#activations")


def test_paths_that_read_like_markup_are_text(browser, show):
    """They are shown as they are, and nothing of them is run."""
    evil = "</script><img src=x onerror=alert(1)>.<b>.k"
    plan = make_plan([VariableSpec(evil, (6, 4), "float32")], lm.LayoutMap(MESH, {".*": ("batch", None)}))
    show(plan)

    assert evil == chosen(browser)
    assert [evil] == rows(browser)
    assert [] == browser.find_elements(By.CSS_SELECTOR, "main img, main b")


def test_the_page_of_a_checkpoint(browser, show, tmp_path):
    """It has the checkpoint's facts, its layouts, and whether it is damaged; nothing of rules and memory."""
    values = {"up.kernel": np.ones((8, 16), "float32"), "up.bias": np.ones(16, "float32")}
    layouts = {"up.kernel": lm.Layout((None, "model"), MESH), "up.bias": lm.Layout((None,), MESH)}
    step = saved(str(tmp_path), values, layouts, 7, metadata={"loss": "<b>"})
    found = lm.describe(tmp_path)
    show(found)

    assert f"{tmp_path}/step-7" == text(browser, "h1")
    assert "damage\nnot verified" in text(browser, "#totals")
    assert "step\n7\nby\ntests\nmesh\nstage=2, batch=2, model=4\n" in text(browser, "#checkpoint")
    assert '{"loss": "<b>"}' in text(browser, "#checkpoint")
    assert ["up.kernel", "up.bias"] == rows(browser)
    assert "(unsharded, model) sharded over model" in text(browser, "#details")
    assert ("rule" in text(browser, "main"), find(browser, "#memory-panel").is_displayed()) == (False, False)

    file = tmp_path / "step-7" / step.manifest.files[0].name
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    show(SimpleNamespace(to_html=lambda: found.to_html(found.verify())))

    assert "damage\n1 error" in text(browser, "#totals")
    assert "up.bias: its values differ from the saved ones" in text(browser, "#problems")
    find(browser, "#problems button").click()
    assert "up.bias" == chosen(browser)


def test_a_step_is_shown_as_its_parts_and_what_travels(browser, show):
    """A bar whose parts add up, a row for each kind of collective, which leads to the weight that causes it."""
    plan = costs.plan()
    show(plan)

    widths = browser.execute_script(
        "return [...document.querySelectorAll('#cost .bar .use')].map((part) => parseFloat(part.style.width))"
    )
    assert len(plan.cost.time_parts) == len(widths)
    assert 100 == pytest.approx(sum(widths), abs=0.01)
    cells = browser.execute_script(
        "return [...document.querySelectorAll('#cost tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    shown = []
    for row in plan.cost.collective_rows:
        kind, times, over, network, tensor, sent, takes, cause, phase = row.cells
        figures = [tensor, sent, takes + " (overlaps)" * row.is_overlapped]
        shown.append([cause + phase, f"{kind} \u00d7 {times}over {over}, {network}", *figures])
    assert shown == cells
    assert "fits: 30.0 GiB of 79.1 GiB per device, at the peak of a step" == text(browser, "#headline")
    find(browser, "#cost tbody .link").click()
    assert "blocks.0.up.kernel" == chosen(browser)
    assert "all-gather of 14.0 MiB over data, 2 times" in text(browser, "#details")


EXPLAINED = {
    "step": "step",
    "mesh": {"batch": 2, "model": 4},
    "sent_bytes": 3 * 2**20,
    "argument_bytes": 2**20,
    "temporary_bytes": 2**10,
    "collectives": [
        {
            "kind": "all_gather",
            "dims": ["model"],
            "calls": 2,
            "shape": [512, 1024],
            "sent_bytes": 3 * 2**20,
            "line": "train.py:31",
            "cause": "params['up']['kernel']",
            "is_full_gather": True,
        }
    ],
    "products": [{"line": "train.py:31", "flops": 4000, "ideal_flops": 1000.0}],
    "recompilations": ["x has shape (4, 8), before (8, 8)"],
}


def test_an_explained_step_is_shown_with_its_lines_and_causes(browser, open_page, folder):
    """A cause leads to its variable, and a line of products that devices repeat stands out."""
    kernel = VariableSpec("up.kernel", (512, 1024), "float32")
    plan = make_plan([kernel], lm.LayoutMap(MESH, {"up": (None, "model")}))
    path = folder / "explained.html"
    path.write_text(plan.to_html(explained=EXPLAINED), encoding="utf-8")
    open_page(path)

    assert "step on batch=2, model=4: each device sends 3.0 MiB" in text(browser, "#explained")
    rows = [
        [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
        for row in browser.find_elements(By.CSS_SELECTOR, "#explained tbody tr")
    ]
    assert [
        [
            "params['up']['kernel']\ngathered in full",
            "all_gather \u00d7 2\nover model",
            "train.py:31",
            "512 \u00d7 1,024",
            "3.0 MiB",
        ],
        ["train.py:31", "4,000", "1,000", "4.00"],
    ] == rows
    assert "x has shape (4, 8), before (8, 8)" in text(browser, "#explained")
    find(browser, "#explained tbody .link").click()
    assert "up.kernel" == chosen(browser)


def test_a_step_is_shown_by_the_command_line_and_files_are_checked(folder, browser):
    saved_plan, saved_step, page = (folder / name for name in ("plan.json", "step.json", "of_step.html"))
    saved_plan.write_text(PLAN.to_json())
    saved_step.write_text(json.dumps(EXPLAINED))
    with redirect_stdout(io.StringIO()):
        assert main(["plan", str(saved_plan), "--html", str(page), "--step", str(saved_step)]) in (0, 1)
    assert "train.py:31" in page.read_text()
    for wrong in ({}, {**EXPLAINED, "products": [{}]}, [1]):
        with pytest.raises(lm.PlanError, match="not the explanation of a compiled step"):
            PLAN.to_html(explained=wrong)


def test_a_plan_without_a_cost_shows_no_step(browser, show):
    """Activations are then not counted, and the page says so."""
    show(PLAN)

    assert not find(browser, "#cost-panel").is_displayed()
    assert not find(browser, "#explained-panel").is_displayed()
    assert "before activations, which are not counted here" in text(browser, "#memory")
