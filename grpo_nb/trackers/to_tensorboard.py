"""TensorBoard: event files in the run folder, `trackers/tensorboard/`; one of its runs for each log."""

import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_nb.printable import one_line
from grpo_nb.storage import safe_open
from grpo_nb.trackers.tracker import About, Log, Point, Tracker

FOLDERS: Mapping[Log, str] = {"sft": "sft", "metrics": "grpo", "evaluations": "evaluations"}
"""A folder each: a new file takes back steps that older ones of its folder have, and SFT and GRPO count from 1."""
SETTINGS = "settings"


class TensorBoard:
    """Event files; those of a resumed run say from which step on the older ones do not count."""

    newest = None

    def __init__(self, about: About) -> None:
        own = (about.folder / name for name in (*FOLDERS.values(), SETTINGS))
        for folder in (about.folder, _unfinished(about.folder), *own):
            safe_open.refuse_linked(folder)
        self.fresh = not about.folder.exists()
        self._about, self._writers = about, dict[Log, Any]()
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        if not (about.folder / SETTINGS).exists():
            _write_settings(about)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in point.numbers.items()]
            # one record of a row: `add_scalar` writes one of each number, which takes several times as long
            self._of(point.log).file_writer.add_summary(self._summary(value=values), point.step)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _of(self, log: Log) -> Any:
        if log not in self._writers:
            newest = 0 if self.fresh else self._about.newest.get(log, 0)
            purge = None if log == "evaluations" else newest + 1
            self._writers[log] = _writer(self._about.folder / FOLDERS[log], purge)
        return self._writers[log]


def _unfinished(folder: Path) -> Path:
    """Folder in which the settings are written; outside, since TensorBoard shows each folder inside as a run."""
    return folder.with_name(f"{folder.name}.{SETTINGS}.tmp")


def _write_settings(about: About) -> None:
    """Write the settings completely or, after a kill, not at all: the next start writes them anew."""
    if (unfinished := _unfinished(about.folder)).exists():
        shutil.rmtree(unfinished)
    with _writer(unfinished) as writer:
        rows = "\n".join(f"| {_plain(name)} | {_plain(value)} |" for name, value in about.settings.items())
        writer.add_text(SETTINGS, f"| setting | value |\n| --- | --- |\n{rows}", 0)
    about.folder.mkdir(exist_ok=True)
    unfinished.rename(about.folder / SETTINGS)


def _writer(folder: Path, purge: int | None = None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge)


def _plain(value: object) -> str:
    """A value as text of Markdown, which TensorBoard renders: what somebody else's run says loads no picture there.

    >>> _plain("a|![b](c)")
    'a&#124;&#33;&#91;b&#93;&#40;c&#41;'
    """
    return re.sub(r"[^\w\s.,-]|_", lambda found: f"&#{ord(found[0])};", one_line(value))


def opened(about: About) -> Tracker:
    """TensorBoard for a run."""
    return TensorBoard(about)
