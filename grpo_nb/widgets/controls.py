"""Controls of a run: each beta, the temperature, pause, resume, stop.

A callback writes a knob and nothing else, so it may run on any thread. The controls never remember what
was asked: they show what the knob file and the newest metrics row say, wherever the change came from.
"""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as w

from grpo_nb.config import ObjectiveConfig
from grpo_nb.knobs import Knob, KnobSnapshot
from grpo_nb.run import RunError

Row = Mapping[str, Any]
Say = Callable[[str], None]


class KnobControl:
    """One knob as a row: a slider to feel, a box to be exact, a toggle for the controller, and what is in use."""

    def __init__(self, knob: Knob, slider: w.Widget, say: Say) -> None:
        self.knob, self.slider, self._say = knob, slider, say
        low, high = knob.bounds
        self.entry = w.BoundedFloatText(
            value=knob.value,
            min=low,
            max=high,
            step=0.001,
            tooltip=f"{slider.description}, exactly",
            layout=w.Layout(width="88px"),
        )
        self.auto: w.ToggleButton | None = None
        self.label = w.HTML(layout=w.Layout(width="230px"))
        self._own = threading.local()  # set while this thread moves the widgets itself
        slider.observe(self._moved, names="value")
        self.entry.observe(self._moved, names="value")

    def with_auto(self, tooltip: str) -> "KnobControl":
        """Add the toggle that gives the knob back to its controller."""
        self.auto = w.ToggleButton(value=False, description="auto", tooltip=tooltip, layout=w.Layout(width="64px"))
        self.auto.observe(self._toggled, names="value")
        return self

    @property
    def widget(self) -> w.HBox:
        parts = [self.slider, self.entry, *([self.auto] if self.auto else []), self.label]
        return w.HBox(parts, layout=w.Layout(align_items="center"))

    def follow(self, asked: float, automatic: bool, in_use: float | None) -> None:
        """Show the knob as it stands: the controller's value while it is automatic, else what was asked for."""
        shown = in_use if automatic and in_use is not None else asked
        self._show(shown, automatic)
        text = _words(shown, in_use, automatic)
        if text != self.label.value:
            self.label.value = text

    def _show(self, value: float, automatic: bool) -> None:
        self._own.moving = True
        try:
            if not math.isclose(self.entry.value, value, rel_tol=1e-9):
                self.entry.value = _rounded(value) if automatic else value
                self.slider.value = value
            if self.auto is not None and self.auto.value != automatic:
                self.auto.value = automatic
        finally:
            self._own.moving = False

    def _moved(self, change: Any) -> None:
        if getattr(self._own, "moving", False):
            return
        value = change["new"] if change["owner"] is self.entry else _rounded(change["new"])
        self._write(lambda: self.knob.set(value, by="dashboard"))
        self._show(value, automatic=False)

    def _toggled(self, change: Any) -> None:
        if getattr(self._own, "moving", False):
            return
        if change["new"]:
            self._write(lambda: self.knob.set_auto(by="dashboard"))
        else:
            self._write(lambda: self.knob.set(self.entry.value, by="dashboard"))

    def _write(self, change: Callable[[], object]) -> None:
        self._say("")
        try:
            change()
        except (RunError, OSError) as error:
            self._say(f"not changed: {error}")


class Controls:
    """Every knob and command of one session; `widget` to show, `follow` to bring up to date."""

    def __init__(self, session: Any, say: Say) -> None:
        self._session, self._say = session, say
        config = session.run.config
        self.knobs: dict[str, KnobControl] = {
            f"beta/{name}": beta_control(session.knobs[f"beta/{name}"], name, objective, say)
            for name, objective in config.objectives.items()
        }
        self.knobs["temperature"] = temperature_control(session.knobs["temperature"], say)
        self.pause = self._button("Pause", "pause", "hold before the next step", session.pause)
        self.resume = self._button(
            "Resume", "play", "go on, from a pause or from the newest checkpoint", session.resume
        )
        self.stop = self._button("Stop", "stop", "finish this step, save, end", session.stop)
        buttons = w.HBox([self.pause, self.resume, self.stop], layout=w.Layout(margin="8px 0 0 134px"))
        self.widget = w.VBox([control.widget for control in self.knobs.values()] + [buttons])

    def follow(self, state: str, row: Row) -> None:
        """Show the knobs as the files have them and allow the commands that `state` allows."""
        asked: KnobSnapshot = self._session.knobs.snapshot()
        for name, control in self.knobs.items():
            control.follow(asked.values[name], asked.modes[name] == "auto", _number(row.get(name)))
        if asked.problem:
            self._say(asked.problem)
        self.pause.disabled = state not in ("starting", "running")
        self.resume.disabled = state not in ("paused", "stopped", "dead", "failed")
        self.stop.disabled = state not in ("starting", "running", "paused")

    def _button(self, name: str, icon: str, tooltip: str, command: Callable[[], object]) -> w.Button:
        button = w.Button(description=name, icon=icon, tooltip=f"{name}: {tooltip}", layout=w.Layout(width="96px"))

        def pressed(_: object) -> None:
            try:
                command()
            except (RunError, OSError) as error:
                self._say(str(error))

        button.on_click(pressed)
        return button


def beta_control(knob: Knob, name: str, objective: ObjectiveConfig, say: Say) -> KnobControl:
    """A logarithmic slider over the objective's beta bounds; the box takes any beta, 0 too."""
    low, high = (math.log10(bound) for bound in objective.beta_bounds)
    slider = w.FloatLogSlider(value=knob.value, min=low, max=high, step=0.05, **_naming(f"β {name}"))
    control = KnobControl(knob, slider, say)
    if objective.kl_band is None or not objective.controlled:
        return control
    return control.with_auto("let the controller hold the KL from {} to {} nats a token".format(*objective.kl_band))


def temperature_control(knob: Knob, say: Say) -> KnobControl:
    """A slider over the usual temperatures; the box takes all that the knob allows."""
    return KnobControl(
        knob, w.FloatSlider(value=knob.value, min=0.1, max=2.0, step=0.05, **_naming("temperature")), say
    )


def _naming(name: str) -> dict[str, Any]:
    return {
        "description": name,
        "tooltip": name,
        "readout": False,  # it would round; the box beside it is exact
        "continuous_update": False,
        "style": {"description_width": "130px"},
        "layout": w.Layout(width="420px"),
    }


def _words(shown: float, in_use: float | None, automatic: bool) -> str:
    if in_use is None:
        return f"{_short(shown)} from step 1 on" + (", then the controller's" if automatic else "")
    if automatic:
        return f"in use <b>{_short(in_use)}</b> (auto)"
    if math.isclose(shown, in_use, rel_tol=1e-6, abs_tol=1e-12):
        return f"in use <b>{_short(in_use)}</b>"
    return f"requested <b>{_short(shown)}</b>, in use {_short(in_use)}"


def _short(value: float) -> str:
    return f"{value:.4g}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
