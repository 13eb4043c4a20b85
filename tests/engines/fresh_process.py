"""Python text, run in a process that loads all it needs itself."""

import os
import subprocess
import sys
from collections.abc import Mapping

TIMEOUT_SECONDS = 120


def run(text: str, environment: Mapping[str, str | None]) -> subprocess.CompletedProcess[str]:
    """Run a text, with these changes of the environment; `None` takes a name out."""
    changed = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", text], env=changed, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
