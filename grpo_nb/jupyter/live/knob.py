"""The box and the slider of a knob, as the browser draws them (`knob.js`).

ipywidgets' own sliders show no number while they are dragged where their readout would round, give a screen reader the
exponent in place of the number, and its boxes silently drop text that is no number.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

_HERE = Path(__file__).parent


class _Knob(anywidget.AnyWidget):
    _esm = (_HERE / "knob.js").read_text(encoding="utf-8")
    _css = (_HERE / "knob.css").read_text(encoding="utf-8")
    shape = traitlets.Unicode().tag(sync=True)
    value = traitlets.CFloat().tag(sync=True)
    step = traitlets.CFloat().tag(sync=True)
    """Step of an arrow key; of a logarithmic slider in powers of ten."""
    description = traitlets.Unicode().tag(sync=True)
    """The name, also for a screen reader."""


class Box(_Knob):
    """A number to type; `refused` is called with a text that is none."""

    def __init__(self, refused: Callable[[str], None], **options: Any) -> None:
        super().__init__(shape="box", **options)
        self._refused = refused
        self.on_msg(self._told)

    def _told(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict) and content.get("kind") == "refused":
            self._refused(str(content.get("text", ""))[:80])


class Slider(_Knob):
    """A number to move from `low` to `high`; `log`: evenly in powers of ten."""

    low = traitlets.CFloat().tag(sync=True)
    high = traitlets.CFloat().tag(sync=True)
    log = traitlets.Bool(False).tag(sync=True)

    def __init__(self, **options: Any) -> None:
        super().__init__(shape="slider", **options)
