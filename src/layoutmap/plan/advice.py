"""Describe a change of a plan that reduces the memory per device, with the bytes that are then needed."""

from __future__ import annotations

from dataclasses import dataclass

from layoutmap.core.text_table import format_bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of a plan that reduces the memory that each device needs.

    Args:
        what: The change in words.
        python: The change in Python: arguments of `lm.plan` and of the layout map.
        command: The change on the command line: options, then lines for a rules file; empty: not possible.
        needed_bytes: The memory that each device needs with the change.
        step: The duration of a training step with the change, as text; empty: unknown.
    """

    what: str
    python: str
    command: str
    needed_bytes: int
    step: str = ""

    def format_headline(self, available_bytes: int) -> str:
        """Return the needed memory, whether it fits, the duration of a step, and the change, in one line."""
        fits = "fits" if self.needed_bytes <= available_bytes else "not enough"
        return f"{', '.join(filter(None, (format_bytes(self.needed_bytes), fits, self.step)))}: {self.what}"

    def format_text(self, available_bytes: int, *, as_command: bool = False, excluded: str = "") -> str:
        """Return the headline, and on lines below it the Python code or the command-line options to type.

        Args:
            available_bytes: The memory of a device.
            as_command: Whether to write the change for the command line, if it can be expressed there.
            excluded: An option that the command does not accept for this model.
        """
        can = self.command and not (excluded and excluded in self.command)
        typed = self.python if not as_command else self.command if can else f"in Python: {self.python}"
        return "\n  ".join([self.format_headline(available_bytes), *typed.splitlines()])
