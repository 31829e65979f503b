"""The error of an export that was refused."""

from grpo_nb.printable import Clean


class ExportError(Clean, ValueError):
    """Raised when a run cannot be exported; the message has what was found, what is needed and the remedy."""
