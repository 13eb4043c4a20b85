"""Escape characters in names that would move a terminal's cursor, change its color, or reverse its text.

Paths, patterns, and dim names can contain any text. The escapes are those of JSON, so that escaped JSON stays the same
JSON. Letters of all scripts, accents and emoji stay as they are.
"""

from __future__ import annotations

import re

# Control characters (C0, DEL, C1), line and paragraph separators, direction controls, zero-width characters that no
# script needs, and unpaired surrogates, which no encoding can write.
_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escape_text(text: str, *, keep: str = "") -> str:
    r"""Replace the characters of a text that are unsafe on a terminal by escapes, such as `\u001b`.

    Args:
        text: Any text.
        keep: Control characters to keep, such as the newlines of a text of several lines.

    Example:
        >>> print(escape_text("red \x1b[31m\n"), escape_text("a\nb", keep="\n"))
        red \u001b[31m\n a
        b
    """
    return _UNSAFE.sub(lambda m: m[0] if m[0] in keep else _SHORT.get(m[0], f"\\u{ord(m[0]):04x}"), text)


def escape_html(text: str, *, keep: str = "") -> str:
    r"""Escape the HTML markup in a text, and also the characters that `escape_text` escapes.

    Args:
        text: Any text.
        keep: Control characters to keep, as for `escape_text`.

    Example:
        >>> print(escape_html("<b>" + chr(0x202E)))
        &lt;b&gt;\u202e
    """
    from html import escape  # imported here, because few programs write HTML

    return escape(escape_text(text, keep=keep))
