"""The error of an export that was refused."""

from grpo_nb.printable import Clean


class ExportError(Clean, ValueError):
    """A run cannot be exported as requested: the message says what was found, what is needed, what to change."""
