"""Status of a run in two lines: its place and step; the newest numbers and settings."""

import os
import socket
from datetime import datetime
from typing import Any

from grpo_nb.jupyter import notices
from grpo_nb.jupyter.tailing import Followed
from grpo_nb.metrics import keys
from grpo_nb.metrics.pace import pace
from grpo_nb.report.markup import html
from grpo_nb.run.lock import Owner
from grpo_nb.storage.journal import Row
from grpo_nb.storage.vocabulary import RunState

CLASS = "grpo-nb"
"""CSS class of every widget of a live view."""
STAGES = {"sft": "SFT", "grpo": "GRPO"}


def status_html(session: Any, state: RunState, followed: Followed, gpu: str = "") -> str:
    """The two lines, as HTML, and below them the bar of `gpu.Gauge`."""
    rows, status = followed.newest(), session.run.status()
    step, steps = int(rows[-1]["step"]) if rows else 0, session.steps
    target = max(session.target or followed.goal(session.stage) or steps, step)
    owner = status.owner if state.is_active else None
    reached = f"{STAGES[session.stage]} step {step} of {target}" + (f" ({steps} in all)" if target < steps else "")
    if not rows and session.stage == "grpo" and status.sft is not None:
        reached = "SFT step {} of {}".format(*status.sft)
    parts = [
        reached,
        *([session.doing(owner.doing)] if owner is not None and owner.doing else []),
        *pace(rows, target - step if state.is_active else 0),
        f"as of {datetime.now():%H:%M:%S}",
    ]
    last = rows[-1] if rows else {}
    return str(
        html(
            "status",
            panel=CLASS,
            run=session.run.name,
            state=state,
            colour=notices.colour(state),
            where=place(session, owner),
            parts=parts,
            numbers=numbers(session, last),
            gpu=gpu,
        )
    )


def place(session: Any, owner: Owner | None) -> str:
    """Place of the current training; empty without one."""
    if session.live and session.where != "process":
        return "in this kernel"
    if owner is None:
        return ""
    if owner.host != socket.gethostname():
        return f"in process {owner.pid} on {owner.host}"
    return "in this kernel" if owner.pid == os.getpid() else f"in process {owner.pid} of this machine"


def numbers(session: Any, row: Row) -> list[str]:
    """Reward, KL, β and temperature of a row; of SFT its loss and learning rate."""
    if session.stage == "sft":
        return _named(row, {"loss": keys.LOSS, "learning rate": keys.LR})
    objectives = session.run.config.objectives
    families = {"reward": keys.REWARD, "KL": keys.KL, "β": keys.BETA}
    found = [_each(row, title, {name: key.of(name) for name in objectives}) for title, key in families.items()]
    named = {"temperature": keys.TEMPERATURE, "learning rate": keys.LR}
    return [*filter(None, found), *_named(row, named), *_memory(row), *_engine(row), *_threads(session)]


def _named(row: Row, names: dict[str, str]) -> list[str]:
    return [f"{title} {value:.3g}" for title, key in names.items() if (value := _number(row, key)) is not None]


def _each(row: Row, title: str, names: dict[str, str]) -> str:
    values = [f"{name} {value:.3g}" for name, key in names.items() if (value := _number(row, key)) is not None]
    return f"{title} {', '.join(values)}" if values else ""


def _memory(row: Row) -> list[str]:
    """Peak memory of the step."""
    peak = _number(row, keys.MEMORY_PEAK)
    return [f"memory {peak / 1024:.2f} GiB at the peak"] if peak is not None else []


def _engine(row: Row) -> list[str]:
    return [f"engine {row[keys.ENGINE]}"] if row.get(keys.ENGINE) else []


def _threads(session: Any) -> list[str]:
    """CPU threads, as the newest start has them."""
    count = session.run.milestone().get("threads")
    return [f"{count} CPU thread{'s' * (count != 1)}"] if isinstance(count, int) else []


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
