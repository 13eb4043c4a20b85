"""Sizes and tables as people read them: as text for a terminal, as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from layoutmap.core.escaping import escaped

_TABLE = "border-collapse:collapse;color:inherit"  # of a dark notebook, too
_CELL = "padding:.15em .7em;text-align:left;font-family:monospace;white-space:nowrap"


def size(num_bytes: float) -> str:
    """A size as people read it.

    Example:
        >>> size(3 * 2**20), size(100)
        ('3.0 MiB', '100 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Container[str] = ()) -> list[str]:
    """Rows of text in columns, under a head and a rule."""
    table = [head, *(tuple(map(escaped, cells)) for cells in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(cells, widths, head, strict=True)
        ).rstrip()
        for cells in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as an HTML table; everything is escaped."""
    from html import escape

    top = "".join(f'<th style="{_CELL}">{escape(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<table style="{_TABLE}"><caption style="text-align:left">{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    )
