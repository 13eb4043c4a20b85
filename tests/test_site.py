"""The site in a browser, opened from the disk, with no network and with the keyboard alone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest
from browsers import opened
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from test_docs import FENCE


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests of this file."""
    with opened(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def build(folder, *options):
    subprocess.run(
        [
            str(Path(sys.executable).parent / "mkdocs"),
            "build",
            "--quiet",
            "--site-dir",
            str(folder),
            *options,
        ],
        cwd=frameworks.ROOT,
        env={"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """All of it; the tests that have it are long, since that takes a while."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


def article(page):
    """What a page shows of its source, without the frame around it."""
    html = page.read_text(encoding="utf-8")
    return html[html.index("<article") : html.index("</article>")]


def sources(site):
    """Each page of the site that is written by hand, and its source."""
    docs = frameworks.ROOT / "docs"
    for source in docs.rglob("*.md"):
        place = source.relative_to(docs)
        page = site / (
            place.parent / "index.html" if place.name == "README.md" else place.with_suffix(".html")
        )
        if page.exists() and source != docs / "README.md":  # in its place the site has index.md
            yield source.read_text(encoding="utf-8"), page


def shown_marks(shown):
    """Return the marks of Markdown that a page shows: fences outside inline code, and openings of boxes and tabs."""
    outside = re.sub(r"(?<!<pre>)<code>.*?</code>", "", re.sub(r"<span></span>", "", shown), flags=re.DOTALL)
    prose = re.sub(r"<pre.*?</pre>", "", outside, flags=re.DOTALL)
    return re.findall("```", outside) + re.findall(r"(?:\?\?\?\+?|!!!|===) ", prose)


@pytest.mark.long
def test_each_fence_is_a_block_of_code(site):
    """As many blocks as fences, and no mark of one in the prose or in a block; made by mkdocstrings are more."""
    wrong = []
    for text, page in sources(site):
        shown = article(page)
        fences, blocks = len(FENCE.findall(text)), shown.count("<pre")
        marks = shown_marks(shown)
        marks += re.findall(r"<blockquote>\s*<blockquote>", shown)  # examples as prose
        if marks or blocks < fences or (blocks > fences and "::: layoutmap" not in text):
            wrong.append((page.name, fences, blocks, marks))

    assert [] == wrong


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()


def search(browser):
    press(browser, "/")
    focus = "return document.activeElement.matches('.md-search__input')"
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(focus))


@pytest.mark.long
def test_search_works_from_the_disk_by_keyboard(browser, site):
    """`/` begins it, the page that is for users comes first, Enter opens it, Escape ends it; nothing is fetched."""
    browser.get((site / "how-to" / "fsdp.html").as_uri())
    search(browser)
    press(browser, "shadowed rule")
    found = WebDriverWait(browser, 20).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    )
    assert found[0].get_attribute("href").startswith((site / "errors.html").as_uri())
    press(browser, Keys.ESCAPE)
    assert "BODY" == browser.execute_script("return document.activeElement.tagName")
    search(browser)
    WebDriverWait(browser, 20).until(lambda _: found[0].is_displayed())
    press(browser, Keys.ARROW_DOWN)
    focus = "return document.activeElement.matches('.md-search-result__link')"
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(focus))
    press(browser, Keys.ENTER)
    WebDriverWait(browser, 20).until(lambda b: b.current_url.startswith((site / "errors.html").as_uri()))
    assert [] == browser.get_log("browser")


@pytest.mark.long
def test_what_has_the_focus_is_seen(browser, site):
    """The first ten stops of the Tab key have an outline, or are the field of the search, which opens."""
    browser.get((site / "index.html").as_uri())
    outlines = {}
    for _ in range(10):
        press(browser, Keys.TAB)
        name, *seen = browser.execute_script(
            """const e = document.activeElement;
            return [e.className, ...[e, ...(e.labels ?? [])].map(e => getComputedStyle(e).outlineStyle)]"""
        )
        outlines[name.split()[0]] = any(outline != "none" for outline in seen)
    assert "md-skip" == next(iter(outlines))
    assert ["md-search__input"] == [name for name, seen in outlines.items() if not seen]


# How far a page scrolls sideways, and what of it is out of sight and in no box that scrolls.
SIDEWAYS = """
document.body.setAttribute("data-md-color-scheme", arguments[0]);
const root = document.scrollingElement, scrolls = ["auto", "scroll"];
const boxes = [...document.querySelectorAll(".md-content *")].filter(e => e.getBoundingClientRect().right > innerWidth);
const boxed = e => e && (scrolls.includes(getComputedStyle(e).overflowX) || boxed(e.parentElement));
return [root.scrollWidth - root.clientWidth, boxes.filter(e => !boxed(e.parentElement)).map(e => e.outerHTML)];
"""


def wide_pages(browser, folder):
    """The pages of a site that scroll sideways or lose what is wide, at two widths, light and dark."""
    for width in (1280, 390):
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        for page in sorted(folder.rglob("*.html")):
            browser.get(page.as_uri())
            for scheme in ("default", "slate"):
                if [0, []] != (seen := browser.execute_script(SIDEWAYS, scheme)):
                    yield str(page.relative_to(folder)), width, scheme, *seen
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.long
def test_no_page_scrolls_sideways(browser, site):
    """Tables and code scroll in boxes of their own."""
    assert [] == list(wide_pages(browser, site))


def test_the_widest_pages_do_not_scroll_sideways(browser, tmp_path):
    """The landing page, wide tables, code and what a notebook shows; of a page without such boxes it is seen."""
    docs = frameworks.ROOT / "docs"
    for name in ("stylesheets", "javascripts", "pictures"):
        shutil.copytree(docs / name, tmp_path / "docs" / name)
    for name in ("index.md", "step-cost.md", "notebooks/one-rules-file.ipynb"):
        (tmp_path / "docs" / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(docs / name, tmp_path / "docs" / name)
    (tmp_path / "docs" / "wide.md").write_text('# Wide\n\n<p style="width: 3000px">wide</p>\n')
    settings = {"INHERIT": str(frameworks.ROOT / "mkdocs.yml"), "docs_dir": "docs", "strict": False}
    settings |= {"nav": None, "plugins": [], "hooks": [str(frameworks.ROOT / "tools" / "site_hooks.py")]}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))
    build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))

    assert {"wide.html"} == {page for page, *_ in wide_pages(browser, tmp_path / "site")}
