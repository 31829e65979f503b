"""`grpo_nb.reload()`: import the package's edited code into a running kernel.

A run lives in its directory, so no object is converted: the modules are imported anew, and the new code opens the
notebook's runs, sessions and dashboards again.
"""

import importlib
import sys
import threading
from types import FunctionType, ModuleType
from typing import Any

from grpo_nb import fingerprint
from grpo_nb.jupyter import kernel
from grpo_nb.run.lock import held_here
from grpo_nb.run.run import RunError

PACKAGE = fingerprint.PACKAGE
Modules = dict[str, ModuleType]


def reload() -> list[str]:
    """Import the package's sources again, all or none of them; return the files that had changed.

    Variables of the notebook that hold a module, class or function of the package get the new one. Runs, sessions,
    dashboards and settings are opened again. One line names the variables that still hold objects of the old code.

    Raises:
        RunError: a run trains in this kernel, or the edited code cannot be imported. Nothing was changed.
    """
    _refuse_while_training()
    edited, old = fingerprint.changed(), _loaded()
    _import_anew(old)
    if kept := _renew(vars(sys.modules["__main__"]), old):
        kernel.notify(
            f"{', '.join(kept)}: still of the old code. Run the cells that make them again; `{PACKAGE}.Run.open(path)` "
            f"and `{PACKAGE}.attach(path)` read everything from the run directory."
        )
    return edited


def _refuse_while_training() -> None:
    sessions = [session for thread in threading.enumerate() if (session := getattr(thread, "grpo_nb_session", None))]
    for run in [*(session.run.path for session in sessions), *(lock.parent for lock in held_here())]:
        raise RunError(
            f"{run.name} is being trained by this kernel, and new code must not change a run midway. Stop the session, "
            f"or end a training without one by `{PACKAGE}.release({str(run)!r})`, and reload; or restart the kernel."
        )


def _loaded() -> Modules:
    return {name: module for name, module in sys.modules.copy().items() if f"{name}.".startswith(f"{PACKAGE}.")}


def _import_anew(old: Modules) -> None:
    for name in old:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        for name in old:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if not f"{name}.".startswith(f"{error.name}."):  # else its own file was removed
                    raise
    except BaseException as error:
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(old)
        where = f"{error.filename}, line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise RunError(f"nothing was reloaded: {where}{type(error).__name__}: {error}") from error


def _renew(namespace: dict[str, Any], old: Modules) -> list[str]:
    """Replace what the variables hold; the names of those that keep an object of the old code."""
    renewed: dict[int, Any] = {}  # two names of one session stay two names of one session
    kept = []
    for name, value in namespace.copy().items():
        if _home(value) not in old:
            continue
        new = _renewed(value, renewed)
        if name.startswith("_"):  # the shell keeps its own books of `_`, `_1` and the like
            continue
        if new is None:
            kept.append(name)
        else:
            namespace[name] = new
    return kept


def _home(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    return str((value if isinstance(value, type | FunctionType) else type(value)).__module__)


def _renewed(value: Any, renewed: dict[int, Any]) -> Any:
    """Counterpart of `value` in the new code; None where only the cell that made it can make it again."""
    if id(value) not in renewed:
        module = sys.modules.get(_home(value))
        if isinstance(value, ModuleType):
            renewed[id(value)] = module
        elif isinstance(value, type | FunctionType):
            renewed[id(value)] = getattr(module, value.__qualname__, None)
        else:
            try:
                renewed[id(value)] = _reopened(value, renewed)
            except Exception:
                renewed[id(value)] = None
    return renewed[id(value)]


def _reopened(value: Any, renewed: dict[int, Any]) -> Any:
    from grpo_nb.jupyter.session import Session  # here: the new code
    from grpo_nb.jupyter.workers import Job
    from grpo_nb.run import settings
    from grpo_nb.run.run import Run

    match type(value).__name__:
        case "Run":
            return Run.open(value.path)
        case "Config":
            return settings.restored(value.model_dump())
        case "Dashboard":
            return _renewed(value.session, renewed).dashboard()
        case "Session" if not (value._job.tasks or value._job.rewards):  # those are objects of a cell
            run = _renewed(value.run, renewed)
            session = Session(run, Job(run, value.stage, value._job.where, steps=value._job.steps))
            if value._dashboard is not None and not value._dashboard.closed:
                value._dashboard.give_way(session.dashboard())
            return session
    return None
