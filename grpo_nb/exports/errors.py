"""The error of an export that was refused."""

from grpo_nb.printable import Clean


class ExportError(Clean, ValueError):
    """Raised when a run cannot be exported as requested; the message has what was found, what is needed, what to
    change.
    """
