"""Compare the estimated cost of a step with the sizes that XLA's compiler reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layoutmap.core.errors import EngineError
from layoutmap.core.text_table import format_bytes, format_table
from layoutmap.cost.table import StepCost


class StepTooLargeError(EngineError):
    """Raised when a device has too little memory for XLA to compile a step. `peak_bytes` is 0 if unknown."""

    def __init__(self, what: str, *, peak_bytes: int = 0, **rest: Any):
        super().__init__(what, **rest)
        self.peak_bytes = peak_bytes


@dataclass(frozen=True)
class Verified:
    """Comparison of the estimated cost of a step with the sizes that XLA's compiler reports, in bytes per device.

    Args:
        cost: The estimated cost.
        target: The device that XLA compiled for, as in `"h100"`.
        sent_by_kind: Bytes that a device sends by XLA's collectives, by kind.
        argument_bytes: Bytes of the arguments of the compiled step.
        peak_bytes: Largest number of bytes that a device stores at one time.

    Example:
        >>> from layoutmap.core.mesh import Mesh
        >>> cost = StepCost(Mesh(None, "data=4"), (), {}, 0, 1024, 4096)
        >>> print(Verified(cost, "cpu", {"all_reduce": 768}, 1024, 8192))
        bytes            counted  XLA for cpu  quotient
        ---------------  -------  -----------  --------
        sent all_reduce      0 B        768 B      0.00
        sent in total        0 B        768 B      0.00
        arguments        1.0 KiB      1.0 KiB      1.00
        peak             4.0 KiB      8.0 KiB      0.50
    """

    cost: StepCost
    target: str
    sent_by_kind: Mapping[str, int]
    argument_bytes: int
    peak_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in the compiled step."""
        return sum(self.sent_by_kind.values())

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        """Rows of the comparison: a name, the estimated number of bytes, and XLA's number of bytes."""
        counted: dict[str, int] = {}
        for each in self.cost.collectives:
            counted[each.kind] = counted.get(each.kind, 0) + each.count_sent_bytes(self.cost.mesh)
        kinds = sorted({*counted, *self.sent_by_kind})
        return [
            *((f"sent {kind}", counted.get(kind, 0), self.sent_by_kind.get(kind, 0)) for kind in kinds),
            ("sent in total", self.cost.sent_bytes, self.sent_bytes),
            ("arguments", self.cost.argument_bytes, self.argument_bytes),
            ("peak", self.cost.peak_bytes, self.peak_bytes),
        ]

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. See `Plan.to_text` for `width`."""
        head = ("bytes", "counted", f"XLA for {self.target}", "quotient")
        rows = [
            (name, format_bytes(a), format_bytes(b), f"{a / b:.2f}" if b else "") for name, a, b in self.rows
        ]
        return "\n".join(format_table(head, rows, head[1:], width=width))

    __str__ = to_text
