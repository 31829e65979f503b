"""The notebook's kernel: its limits for a session, and lines under the running cell."""

import importlib.metadata
import sys
import threading
import time
import traceback
from typing import Any, Literal

from packaging.version import Version

from grpo_nb.jupyter import process_exit
from grpo_nb.printable import clean_logger, printable

logger = clean_logger(__name__)

NEEDED = "7.4"
"""The first ipykernel that serves widgets while a cell awaits."""
PACKAGE = __name__.partition(".")[0]
SHIELD, WELCOME = "_grpo_nb_shield", "_grpo_nb_welcome"
"""Set on the shell that has the hook: a reloaded module must not add a second."""
FRAMES = 3
"""Frames of a traceback, innermost last, that the cell shows."""
PICTURE_SECONDS = 5.0
"""Seconds between two pictures in the foreground; each takes a fraction of a second from the training."""


def shell() -> Any | None:
    """The IPython shell that runs this code, if one does."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this code; a script, or IPython in a terminal, ends when its code does."""
    return getattr(shell(), "kernel", None) is not None


def limits() -> str | None:
    """Reason why widgets would freeze in this kernel while a thread trains; None where they work or are not shown."""
    if "google.colab" in sys.modules:
        return "Colab does not show what a thread changes"
    if "ipykernel" not in sys.modules or shell() is None:
        return None
    version = importlib.metadata.version("ipykernel")
    if Version(version) >= Version(NEEDED):
        return None
    return f"ipykernel {version} serves no widgets while a cell waits; {NEEDED} does"


def usual_place() -> Literal["thread", "foreground"]:
    """Default place of a session's training; shows a notice where that is the foreground."""
    if (why := limits()) is None:
        return "thread"
    notify(
        f"foreground mode ({why}): this cell trains and shows a picture now and then; interrupt it once to stop and "
        "save; where='process' trains apart, where='thread' insists"
    )
    return "foreground"


def notify(text: str) -> None:
    """One line under the cell that runs; a script gets it as a log record."""
    if shell() is None:
        logger.warning("%s", text)
        return
    from IPython.display import display

    display({"text/plain": printable(text)}, raw=True)  # type: ignore[no-untyped-call]


def memory_held() -> str:
    """Memory that this kernel still holds, after free memory is returned; for the end of a notebook."""
    import psutil

    from grpo_nb.doctor.profiling import memory_snapshot

    process_exit.return_memory()
    found, resident = memory_snapshot(), psutil.Process().memory_info().rss
    gpu = f", and {found.reserved_mib / 1024:.2f} GiB of the GPU's" if found.reserved_mib else ""
    return (
        f"this kernel holds {resident / 2**30:.2f} GiB of memory ({found.allocated_mib:.0f} MiB in tensors){gpu} "
        "until it ends: Kernel, Shut Down Kernel. What was trained is in the run's folder"
    )


def welcome() -> None:
    """List the project's runs under the cell that first imports the package, when it has ended; once a kernel."""
    if (here := shell()) is None or getattr(here, WELCOME, False):
        return
    setattr(here, WELCOME, True)
    here.events.register("post_run_cell", explain_failure)
    displays = here.display_formatter.ipython_display_formatter
    displays.for_type_by_name("grpo_nb.plots.canvas", "Picture", _show_picture)

    def list_runs(*_: Any) -> None:
        here.events.unregister("post_run_cell", list_runs)
        from grpo_nb.jupyter.project import runs_summary

        if text := runs_summary():
            notify(text)

    here.events.register("post_run_cell", list_runs)


def _show_picture(figure: Any) -> None:
    from grpo_nb.report import aloud

    aloud.show_picture(figure)


def explain_failure(result: Any) -> None:
    """Show under a cell that failed with a well-known error its cause and what to change."""
    error = getattr(result, "error_in_exec", None)
    if error is None:
        return
    from grpo_nb.doctor.errors import explain

    if words := explain(error):
        notify(words)


def cell_end() -> threading.Event:
    """Event that is set when the running cell has ended; from the start where no kernel runs one."""
    ended = threading.Event()
    if (here := shell()) is None:
        ended.set()
        return ended

    def end(*_: Any) -> None:
        here.events.unregister("post_run_cell", end)
        ended.set()

    here.events.register("post_run_cell", end)
    return ended


def shorten(error: BaseException, name: str, whole: str | None) -> None:
    """Let a cell show `error` in a few lines: the error that ended `name`, and where its cause arose; `whole`: the file
    with the complete traceback.

    Without `whole` the frames are left out, since the message is all the information.
    """
    lines, cause = [f"{name} failed: {type(error).__name__}: {error}"], error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if whole is not None:
        frames = traceback.format_list(traceback.extract_tb(cause.__traceback__)[-FRAMES:])
        lines += [*"".join(frames).rstrip().splitlines(), f"the whole traceback: {whole}"]
    vars(error)["_render_traceback_"] = lambda: lines


def shield_from_autoreload() -> None:
    """Keep %autoreload, on now or later, away from the package: it would change a run midway. Logs this once."""
    if (here := shell()) is not None and not getattr(here, SHIELD, False):
        setattr(here, SHIELD, True)
        here.events.register("pre_run_cell", lambda *_: _exclude(here))
        _exclude(here)


def _exclude(here: Any) -> None:
    """Mark the package's modules as not to be reloaded; runs before each cell, since modules are loaded later too."""
    magics = here.magics_manager.registry.get("AutoreloadMagics")
    reloader = getattr(magics, "_reloader", None)
    if reloader is None:
        return
    own = [name for name in list(sys.modules) if f"{name}.".startswith(f"{PACKAGE}.")]
    if PACKAGE not in reloader.skip_modules and reloader.enabled:
        notify(
            f"%autoreload leaves {PACKAGE} alone from here on, since it would change a run midway: after an edit, "
            f"stop what trains in this kernel and call {PACKAGE}.reload()"
        )
    for name in own:
        reloader.mark_module_skipped(name)


class Still:
    """A session's line and picture under the cell that runs, drawn by the waiting cell: no widget, no thread."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._handle: Any = None
        self._next = 0.0

    def refresh(self, now: bool = False) -> None:
        """Draw it anew if it is due, or `now`; a failure to draw ends neither the cell nor the training."""
        if shell() is None or not (now or time.monotonic() >= self._next):
            return
        try:
            self._show()
        except Exception:
            logger.exception("the picture of %s could not be drawn", self._session.run.name)
        self._next = time.monotonic() + PICTURE_SECONDS

    def _show(self) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self._bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """Picture and text; the text alone where no picture exists."""
        text = {"text/plain": str(self._session.summary())}
        if self._session.stage == "sft" or self._session.step == 0:
            return text
        bundle: dict[str, str] = self._session.report().bundle()
        return bundle | text
