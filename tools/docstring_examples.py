"""Show the examples of docstrings as code: griffe knows a section `Examples` alone, and theirs are named `Example`."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

HEADING = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class DocstringExamples(Extension):
    """Rename the sections before griffe divides the docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the sections of one docstring."""
        if obj.docstring:
            obj.docstring.value = HEADING.sub(r"\1Examples:", obj.docstring.value)
