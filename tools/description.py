"""README.md as a package index shows it: what links to files of the repository leads there, as of that release.

In a checkout, and wherever the repository is, README's own links hold; on an index they would lead nowhere.
"""

# why: decisions/0089
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|#)")


class Description(MetadataHookInterface):
    """Sets `project.readme`; `project.urls` says where the repository is."""

    def update(self, metadata: dict[str, Any]) -> None:
        at = f"{metadata['urls']['Repository']}/{{}}/v{metadata['version']}/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, at)}


def with_absolute_links(text: str, at: str) -> str:
    """The links of a page relative to `at`, in which `{}` is for a picture's file or for the page of a file."""
    return RELATIVE.sub(lambda link: link[1] + at.format("raw" if link[1][0] == "!" else "blob"), text)
