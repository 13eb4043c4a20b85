"""Make the pictures of the README anew, from real plans, in Debian's chromium.

python tools/pictures.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "plan.png"
MOST_BYTES = 200_000
MODEL = ("keras_hub:llama3_8b", "--mesh", "batch=8,model=8", "--dtype", "bfloat16", "--optimizer", "adamw")
# Nothing of the browser's own goes out, and it runs as root in a container, too.
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --window-size=1280,860"
)


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("there is no chromium here; fix: install Debian's package of that name", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "plan.html", Path(folder) / "plan.png"
        command = [
            sys.executable,
            "-m",
            "layoutmap",
            "plan",
            *MODEL,
            "--device-memory",
            "80GiB",
            "--html",
            str(page),
        ]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "KERAS_BACKEND": "jax"}
        )
        browser = [chromium, *OPTIONS.split(), f"--user-data-dir={folder}/profile", f"--screenshot={shot}"]
        subprocess.run(
            [*browser, "--virtual-time-budget=5000", page.as_uri()],
            check=True,
            capture_output=True,
            timeout=120,
        )
        if shot.stat().st_size > MOST_BYTES:
            print(f"the picture has {shot.stat().st_size:,} bytes, more than {MOST_BYTES:,}", file=sys.stderr)
            return 1
        PICTURE.parent.mkdir(exist_ok=True)
        shutil.copyfile(shot, PICTURE)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
