"""Make README.md's relative links absolute for a package index, where they would lead nowhere (decisions/0089)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|#)")


class Description(MetadataHookInterface):
    """Build hook that sets `project.readme` from the repository's address in `project.urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        at = f"{metadata['urls']['Repository']}/{{}}/v{metadata['version']}/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": make_links_absolute(text, at)}


def make_links_absolute(text: str, at: str) -> str:
    """Return a page with its links relative to `at`, in which `{}` becomes "raw" for a picture and "blob" otherwise."""
    return RELATIVE.sub(lambda link: link[1] + at.format("raw" if link[1][0] == "!" else "blob"), text)
