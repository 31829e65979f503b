"""Pictures with their words for readers aloud: JupyterLab gives the picture of an output no alternative text."""

from base64 import b64encode
from collections.abc import Mapping

from grpo_nb.plots.canvas import Picture
from grpo_nb.report.markup import html

OWN = "grpo-nb-aloud"
"""Class of the words in the page, which are not seen."""


def show_picture(figure: Picture) -> None:
    """A figure as the value of a cell."""
    data, alt = figure._repr_png_()
    show({"image/png": b64encode(data).decode(), "text/plain": repr(figure)}, alt["alt"])


def show(data: Mapping[str, str], words: str) -> None:
    """A picture's data, with the alternative text that pages made from the notebook show, and after it the words."""
    from IPython.display import display

    display(data, raw=True, metadata={"image/png": {"alt": words}})  # type: ignore[no-untyped-call]
    display({"text/html": str(html("aloud", words=words, own=OWN)), "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]
