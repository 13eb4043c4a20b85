"""A browser for the tests that look at pages as a reader does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver

NEEDED = "a browser: install Debian's packages chromium and chromium-driver"
# Nothing of the browser's own goes out, and it runs as root in a container, too.
OPTIONS = """
    --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1440,1000
"""


@contextmanager
def opened(folder: Path) -> Iterator[webdriver.Chrome]:
    """A browser, its files in this folder. Where there is none the test is skipped, or fails if one is needed."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if not all(programs.values()):
        if os.environ.get("LAYOUTMAP_NEEDS_BROWSER"):
            pytest.fail(f"LAYOUTMAP_NEEDS_BROWSER is set, and there is no {NEEDED[2:]}")
        pytest.skip(f"this needs {NEEDED}")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for option in (*OPTIONS.split(), f"--user-data-dir={folder}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(programs["chromedriver"], log_output=subprocess.DEVNULL)
    driver = webdriver.Chrome(options, service)
    try:
        yield driver
    finally:
        driver.quit()
