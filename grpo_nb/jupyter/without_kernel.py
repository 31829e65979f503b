"""Words in the place of a widget, in a notebook that is opened when no kernel has the widget any more.

JupyterLab then shows an error for it. The words are an output of their own after the widget's, with a style that hides
them while the widget exists, and hides the error while it does not: a saved file cannot know which will be the case.
"""

from typing import Any

from IPython.display import display

from grpo_nb.printable import printable
from grpo_nb.report.markup import html

OWN = "grpo-nb-words"
"""CSS class of the words in the page; with the class of their widget, those of one kind of widget."""


class Words:
    """The output with the words; made in the cell that has just shown the widget."""

    def __init__(self, text: str, live: str) -> None:
        """`live`: class of the widget in the page."""
        self._live = live
        self._handle: Any = display(self._bundle(text), raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def say(self, text: str) -> None:
        """Replace the words; remove them where `text` is empty."""
        self._handle.update(self._bundle(text), raw=True)

    def _bundle(self, text: str) -> dict[str, str]:
        shown = str(html("without_kernel", text=text, live=self._live, own=OWN)) if text else ""
        return {"text/html": shown, "text/plain": printable(text)}
