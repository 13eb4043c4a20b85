"""Format byte sizes and tables, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence

from layoutmap.core.escaping import escape_html, escape_text

# Inherit the text color, so that dark notebooks stay readable.
_TABLE = "border-collapse:collapse;color:inherit"
_CELL = "padding:.15em .7em;text-align:left;font-family:monospace;white-space:nowrap"
_MIN_COLUMN_WIDTH = 30  # a column becomes narrower than this only after every column of `drop` is dropped
# Matches the first column of a row, a name, and the blanks after it.
_FIRST_COLUMN = re.compile(r" *\S+(?: \S+)* {2,}")
_LINE_END = "\n"
ALL_COLUMNS = "to_text() shows all"
"""The end of the note below a shortened table. The command line replaces it with its option."""


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text with a binary unit, such as `1.5 MiB`.

    Example:
        >>> format_bytes(3 * 2**20), format_bytes(100)
        ('3.0 MiB', '100 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable: the last unit is for all larger sizes")


def format_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Container[str] = (),
    *,
    width: int | None = None,
    drop: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a text table with aligned columns, below the column names and a line of dashes.

    Args:
        head: The names of the columns.
        rows: A text for each column.
        right: The columns that are aligned to the right.
        width: Maximum width. Columns are dropped and shortened to fit, and the last line lists them. `None`: no limit.
        drop: The columns that may be left out, the least important first.

    Example:
        >>> head, row = ("variable", "dtype", "layout"), ("blocks.{0..31}.mlp.up.kernel", "float32", "(None, model)")
        >>> print(*format_table(head, [row], width=40, drop=["dtype"]), sep="\\n")
        variable                   layout
        -------------------------  -------------
        blocks.{....mlp.up.kernel  (None, model)
        hidden: dtype; shortened: variable; to_text() shows all
    """
    table = [tuple(head), *(tuple(map(escape_text, cells)) for cells in rows)]
    widths = {name: max(len(cells[i]) for cells in table) for i, name in enumerate(head)}
    shown = widths if width is None else _fit_column_widths(widths, width, drop)
    lines = [
        "  ".join(
            _shorten_text(cell, shown[name]).rjust(shown[name])
            if name in right
            else _shorten_text(cell, shown[name]).ljust(shown[name])
            for cell, name in zip(cells, head, strict=True)
            if name in shown
        ).rstrip()
        for cells in table
    ]
    lines.insert(1, "  ".join("-" * column_width for column_width in shown.values()))
    hidden = [name for name in head if name not in shown]
    shortened = [name for name in shown if shown[name] < widths[name]]
    notes = [
        f"{how}: {', '.join(names)}" for how, names in (("hidden", hidden), ("shortened", shortened)) if names
    ]
    return [*lines, "; ".join([*notes, ALL_COLUMNS])] if notes else lines


# A line wider than the terminal would wrap, so columns are dropped and shortened to fit (decisions/0034).
def _fit_column_widths(widths: Mapping[str, int], width: int, drop: Sequence[str]) -> dict[str, int]:
    """Return the width of each shown column by name. Columns in `drop` are left out before others are shortened."""
    shown, least = dict(widths), [*drop]
    while (
        least and sum(min(each, _MIN_COLUMN_WIDTH) for each in shown.values()) + 2 * (len(shown) - 1) > width
    ):
        shown.pop(least.pop(0), None)
    room = width - 2 * (len(shown) - 1)
    while sum(shown.values()) > room and max(shown.values()) > 1:
        shown[max(shown, key=lambda name: shown[name])] -= 1
    return shown


def _shorten_text(text: str, width: int) -> str:
    """Return a text of at most `width` characters. Dots replace its middle, because paths differ most at their ends."""
    if len(text) <= width:
        return text
    tail = 2 * max(0, width - 3) // 3
    return f"{text[: max(0, width - 3 - tail)]}...{text[len(text) - tail :]}"[:width]


def wrap_lines(text: str, width: int | None) -> str:
    """Return text with its lines wrapped between words to at most `width` characters. Continued lines are indented.

    Example:
        >>> print(wrap_lines("  why  rules match from the start of a path", 30))
          why  rules match from the
               start of a path
    """
    if width is None:
        return text
    return "\n".join(line if len(line) <= width else _wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    """Return one line wrapped to a width. Continued lines are aligned below the text after the first column."""
    named = _FIRST_COLUMN.match(line)
    start = named[0] if named and len(named[0]) <= width // 2 else ""
    indent = len(start) or min(len(line) - len(line.lstrip()), width // 2)
    return textwrap.fill(
        line.removeprefix(start).lstrip(),
        width,
        initial_indent=start or " " * indent,
        subsequent_indent=" " * (indent if start else indent + 2),
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def format_html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows as an HTML table with a caption, column names, and escaped cells."""
    top = "".join(f'<th style="{_CELL}">{escape_html(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape_html(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<table style="{_TABLE}"><caption style="text-align:left">{escape_html(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    )


def format_html_pre(text: str) -> str:
    """Return text as an HTML `<pre>` block with markup and control characters escaped, except line ends."""
    return f"<pre>{escape_html(text, keep=_LINE_END)}</pre>"
