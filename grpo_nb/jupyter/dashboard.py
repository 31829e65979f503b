"""The live view of a run: a status line, a bar, pages to turn between, findings, the controls.

All of it comes from the run's files, so it shows a run of this kernel, of another process, or of last week
alike. One thread brings words and curves up to date every second. When the run ends it rests: it looks
now and then whether the run moves again, in whatever process, and ends when the dashboard is closed.
"""

import os
import threading
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import ipywidgets as w

from grpo_nb import plots
from grpo_nb.jupyter import notices, standing
from grpo_nb.jupyter.controls import Controls
from grpo_nb.jupyter.gpu import Gauge
from grpo_nb.jupyter.live import Curves
from grpo_nb.jupyter.notices import Notice
from grpo_nb.jupyter.samples import SampleBrowser
from grpo_nb.jupyter.tailing import Followed
from grpo_nb.printable import clean_logger
from grpo_nb.report import report
from grpo_nb.report.markup import html
from grpo_nb.run.run import Log, RunError
from grpo_nb.storage.journal import Row
from grpo_nb.storage.vocabulary import RunState

logger = clean_logger(__name__)

TICK_SECONDS = 1.0
REST_SECONDS = 3.0
"""Seconds between two looks at a run that does not move; nothing is redrawn for them."""
MOST_FINDINGS = 3
MOST_WORDS = 8
"""Cells that show one view, and whose words are kept up to date."""
SAMPLES = "samples"
READING = {
    "overview": "Reward is the number to watch. The loss is left out: it stays near 0 by construction, because the "
    "advantages of a group add up to nothing.",
    "rewards": "A function whose band is flat gives a whole group the same reward, so the group teaches nothing.",
    "machinery": "The black line over the phases is the complete step. Norms and cosines need "
    "algorithm.gradient_report_every.",
    SAMPLES: "What the reward sees. Point at a token for its log-prob in nats.",
}


class Dashboard:
    """The widgets of one session; `watch` keeps them up to date until `close`."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.status = w.HTML()
        self.gpu = Gauge(session)
        self.notices = w.HTML(layout=w.Layout(min_height="26px"))
        self.findings = w.HTML()
        self.message = w.HTML()
        self.bar = w.FloatProgress(min=0, max=1.0, layout=w.Layout(width="100%", height="12px"))
        grpo = session.stage == "grpo"
        self.followed = Followed(session.run, _log(session), MOST_FINDINGS)
        self.curves = Curves(session.run, self.followed, session.stage, self._report_wanted)
        self.controls = Controls(session, self.notify, self.watch) if grpo else None
        self.samples = SampleBrowser(session.run) if grpo else None
        self.pages = w.ToggleButtons(
            options=[*report.PAGES, SAMPLES],
            tooltips=[READING[page] for page in (*report.PAGES, SAMPLES)],
            style={"button_width": "96px"},
            layout=w.Layout(display=None if grpo else "none", margin="4px 0 0 0"),
        )
        self.caption = w.HTML()
        self.pages.observe(self._turned, names="value")
        self.widget = w.VBox(self._parts())
        self.widget.add_class(standing.CLASS)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self.resting = threading.Event()
        """Set while no run has to be followed."""
        self._words: list[Any] = []
        """Outputs for notebooks that are opened without their kernel."""
        self._wanted = threading.Event()
        """Set when somebody has requested the report."""
        self._read: object = None
        self._lay_out()
        self._try_refresh()

    def _parts(self) -> list[w.Widget]:
        """Widgets from top to bottom; those that change size are below those that a person operates."""
        steering = [self.controls.widget, self.message] if self.controls else [self.message]
        shown = [self.curves, self.samples.widget] if self.samples else [self.curves]
        return [self.status, self.bar, self.notices, *steering, self.pages, self.caption, *shown, self.findings]

    def watch(self) -> None:
        """Follow the run, with a first look at once; no effect when it is followed already."""
        self._wake.set()
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._loop, name="grpo_nb dashboard", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop following and remove the widgets; the run continues."""
        self._closed.set()
        self._wake.set()
        _close(self.widget)

    def give_way(self, other: "Dashboard") -> None:
        """Stop following, and show `other` wherever this one is displayed."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()  # nothing of the old code is shown together with the new
        parts, self.widget.children = self.widget.children, (other.widget,)
        for part in parts:
            _close(part)

    @property
    def closed(self) -> bool:
        """Whether it shows nothing any more; also true where ipywidgets closed its widgets."""
        return self._closed.is_set() or self.widget.comm is None

    def notify(self, text: str, severity: notices.Severity = "warning", /) -> None:
        """Show one line under the controls; an empty one takes it away."""
        self.message.value = notices.notice_html([Notice(severity, text)]) if text else ""

    def refresh(self) -> None:
        """Bring everything up to date from the files."""
        newest = _signature(self.session.run.path)  # before reading: what is written meanwhile is seen next time
        if newest not in (None, self._read):
            self.followed.read()
            self._read = newest
        state: RunState = self.session.state
        rows = self.followed.newest()
        last = rows[-1] if rows else {}
        step = int(last.get("step", 0))
        self.status.value = standing.status_html(self.session, state, self.followed, self.gpu.html())
        self.notices.value = _notices(self.session, state, step)
        self.findings.value = _warnings(*self.followed.findings())
        target = self.session.target or self.followed.goal(self.session.stage) or self.session.steps
        self.bar.max, self.bar.value = float(max(target, step, 1)), float(step)
        if self.controls is not None:
            self.controls.follow(state, last)
            self.controls.answer(self.followed.answers())
        if self.pages.value == SAMPLES and self.samples is not None:
            self.samples.refresh()
        self.curves.update(self.session.steps, "" if state.is_active else str(self.session.summary()))
        if self._wanted.is_set():
            self._wanted.clear()
            self.curves.hand_over(report.page(self.session.run))

    def _report_wanted(self) -> None:
        """Request the report, which the thread that follows the run writes."""
        self._wanted.set()
        self.watch()

    def _try_refresh(self) -> None:
        """`refresh`; a view that fails ends neither the watching nor the opening, and never the training."""
        try:
            self.refresh()
        except Exception as error:
            logger.exception("the dashboard of %s could not be brought up to date", self.session.run.name)
            self.notify(f"the dashboard could not be brought up to date ({error}); training is not affected")

    def _turned(self, _: Any) -> None:
        """Handle a choice of another page: the browser has its curves, and the thread that follows reads samples."""
        self._lay_out()
        self.watch()

    def _lay_out(self) -> None:
        reading = self.pages.value if self.session.stage == "grpo" else None
        self.caption.value = str(html("note", text=READING[reading])) if reading else ""
        samples = reading == SAMPLES
        self.curves.layout.display = "none" if samples else None
        if reading and not samples:
            self.curves.page = reading
        if self.samples is not None:
            self.samples.widget.layout.display = None if samples else "none"

    def _loop(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            stood = self._standing()
            active = self.session.followed  # before reading, so that the last row is shown
            self._try_refresh()
            if active or self.session.followed:
                self._wake.wait(TICK_SECONDS)
            else:
                self._rest(stood)

    def _rest(self, stood: object) -> None:
        """Wait until somebody requests an update, the run changes from `stood`, or the widgets are gone."""
        self._say_words()
        self.resting.set()
        while not self._wake.wait(REST_SECONDS) and self._standing() == stood:
            if self.closed:
                self._closed.set()
                return
        self.resting.clear()

    def _standing(self) -> tuple[RunState, int, object]:
        """State of the run that changes when a process takes it up, continues it, or ends."""
        try:
            status = self.session.run.status()
        except (OSError, RunError):
            return RunState.UNREADABLE, 0, None
        return status.state, status.step, status.owner and status.owner.token

    def _ipython_display_(self) -> None:
        """The view, and words for readers of the notebook without its kernel, up to date when the run rests."""
        from IPython.display import display

        from grpo_nb.jupyter.without_kernel import Words

        display(self._repr_mimebundle_(), raw=True)  # type: ignore[no-untyped-call]
        self._words = [*self._words[1 - MOST_WORDS :], Words(self._standing_words(), standing.CLASS)]

    def _say_words(self) -> None:
        try:
            for words in self._words:
                words.say(self._standing_words())
        except Exception:  # without weight for the viewer
            logger.exception("the words below the dashboard of %s could not be changed", self.session.run.name)

    def _standing_words(self) -> str:
        rows = self.followed.newest()
        said = [str(self.session.summary()), *(standing.numbers(self.session, rows[-1]) if rows else [])]
        return f"{' · '.join(said)}. For the live dashboard, run this cell again."

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The widget where there are widgets, else the picture, else a sentence."""
        bundle: dict[str, Any] = dict(self.widget._repr_mimebundle_(**options) or {})
        bundle["text/plain"] = self.session.summary()
        if self.followed.newest():
            figure = _figure(self.session, self.followed, "overview")
            bundle["image/png"] = b64encode(plots.to_kept_png(figure)).decode()
        return bundle


def _close(widget: w.Widget) -> None:
    """Close a widget and all its parts: ipywidgets closes the outermost alone, and keeps the rest for ever."""
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    for part in [*getattr(widget, "children", ()), *filter(None, parts)]:
        _close(part)
    widget.close()


def _log(session: Any) -> Log:
    return "sft" if session.stage == "sft" else "metrics"


def _figure(session: Any, followed: Followed, page: str) -> Any:
    rows, events = followed.frames()
    if session.stage == "sft":
        return plots.sft(rows)
    return report.picture(session.run, rows, page, events)


def _notices(session: Any, state: RunState, step: int) -> str:
    return notices.notice_html(notices.notices(session, state, step))


def _warnings(found: Sequence[Row], left: int) -> str:
    """The findings that are more than a remark, and what to change; how many others there are."""
    shown = [
        Notice(e["severity"], f"step {e.get('step')}: {e.get('message')}", str(e.get("advice") or "")) for e in found
    ]
    return notices.notice_html(shown, f"and {left} more in 04_diagnostics" if left > 0 else "")


def _signature(folder: os.PathLike[str]) -> object:
    """Signature that changes when a log of the run changes; None where its folder cannot be read."""
    try:
        logs = [entry for entry in os.scandir(folder) if entry.name.endswith(".jsonl")]
        return sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in logs)
    except OSError:
        return None
