"""Measure the size of a plan's page, and the response time of a browser on it.

    python benchmarks/page.py                  Llama 3.1 of 405 billion parameters with AdamW, on 4,096 devices

The plan is that of benchmarks/hub_plan.py with the optimizer's slots. Debian's chromium opens the page without a
graphics card. A time runs from the start of the navigation, or from the click, to the next frame on the screen.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import hub_plan
from measure import time_call

# This script runs in the page. It waits for the first frame, then searches, sorts, and selects, each until a frame.
WATCH = """
const picture = () => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))));
window.watched = new Promise((done) => addEventListener("load", async () => {
  const times = { shown: await picture() };
  const timed = async (name, act) => {
    const start = performance.now();
    act();
    times[name] = await picture() - start;
  };
  const search = document.getElementById("search");
  await timed("search", () => {
    search.value = "query_dense";
    search.dispatchEvent(new Event("input"));
  });
  times.interactive = performance.now();
  await timed("every variable in a row", () => document.getElementById("collapsed").click());
  search.value = "";
  search.dispatchEvent(new Event("input"));
  await picture();
  await timed("sort", () => document.querySelector("#grid th button").click());
  await timed("click", () => document.querySelectorAll("#grid [data-entry]")[7].click());
  done(times);
}));
"""
OPTIONS = """
    --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1440,1000
"""


def write_page(path: Path) -> None:
    """Write the page of the plan, and print its bytes and seconds next to those of the other forms."""
    os.environ["KERAS_BACKEND"] = "jax"
    import layoutmap as lm
    from layoutmap.rules import zoo

    def make():
        model = zoo.find_model("llama3_405b").make()
        model.compile(optimizer="adamw")
        return model

    plan = lm.plan(make, lm.LayoutMap.preset("llama", lm.Mesh(None, hub_plan.MESH)), library="keras")
    print(repr(plan))
    for name, form in (
        ("page", plan.to_html),
        ("table of a notebook", plan._repr_html_),
        ("JSON", plan.to_json),
    ):
        seconds, text = time_call(form)
        print(f"{name:<24} {len(text.encode()):>10,} bytes  {seconds:.2f} s")
        if name == "page":
            path.write_text(text, encoding="utf-8")


def open_page(path: Path, repeats: int = 7) -> None:
    """Open the page in the browser, and print the first times and the medians of the others."""
    from selenium import webdriver

    programs = [path for name in ("chromium", "chromedriver") if (path := shutil.which(name))]
    if len(programs) < 2:
        print("no browser: install Debian's packages chromium and chromium-driver")
        return
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder:
        for option in (*OPTIONS.split(), f"--user-data-dir={folder}"):
            options.add_argument(option)
        driver = webdriver.Chrome(
            options, webdriver.ChromeService(programs[1], log_output=subprocess.DEVNULL)
        )
        try:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
            times = []
            for _ in range(repeats):
                driver.get("about:blank")
                driver.get(path.as_uri())
                times.append(driver.execute_script("return watched"))
        finally:
            driver.quit()
    first, *others = times
    print(f"{'ms in the browser':<24} {'first':>8} {'median':>8}  of {len(others)} more")
    for name in ("shown", "search", "interactive", "every variable in a row", "sort", "click"):
        print(f"{name:<24} {first[name]:>8.0f} {statistics.median(each[name] for each in others):>8.0f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder, "plan.html")
        if not page.exists():
            write_page(page)
        open_page(page)
