"""`grpo_nb.reload()`: the package's edited code in a running kernel, with what the notebook holds still good."""

import gc
import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

from grpo_nb import fingerprint
from grpo_nb.run.run import RunError
from grpo_nb.terminal import clean_logger

log = clean_logger(__name__)

PACKAGE = fingerprint.PACKAGE
Modules = dict[str, ModuleType]


def reload() -> list[str]:
    """Load the package's sources anew, all or none of them; which files had changed.

    Every module is imported afresh, each after those that it imports. Objects of the package that the kernel
    holds take their class from the new code; names of the package in the notebook (`Run`, `start`, `presets`)
    stand for the new ones; open runs and sessions are attached to their files again.

    Raises:
        RunError: a worker trains in this kernel, or the edited code cannot be imported; nothing was changed.
    """
    _refuse_while_training()
    edited = fingerprint.changed()
    old = _loaded()
    try:
        _import_afresh(old)
    except BaseException as error:
        _put_back(old)
        raise RunError(f"nothing was reloaded, the code on disk does not import: {_where(error)}") from error
    new = _loaded()
    classes = _renewed_classes(old, new)
    _renew_instances(classes)
    _renew_names(vars(sys.modules["__main__"]), old, new)
    for handle in [thing for thing in gc.get_objects() if hasattr(type(thing), "_reattach")]:
        handle._reattach()
    return edited


def _refuse_while_training() -> None:
    for thread in threading.enumerate():
        session: Any = getattr(thread, "grpo_nb_session", None)
        if session is not None and session.where != "process":
            raise RunError(
                f"{session.run.name} trains in this kernel (step {session.step}), and new code must not change a run "
                "midway: `session.stop()`, `await session.wait()`, then reload; or restart the kernel when it is done"
            )


def _loaded() -> Modules:
    return {name: m for name, m in sys.modules.copy().items() if f"{name}.".startswith(f"{PACKAGE}.")}


def _import_afresh(old: Modules) -> None:
    """The package itself stays the same object, since every notebook holds it; its rooms are new ones."""
    package = old[PACKAGE]
    below = [name for name in old if name != PACKAGE and importlib.util.find_spec(name) is not None]
    for name in [name for name in old if name != PACKAGE]:
        del sys.modules[name]
        vars(package).pop(name.partition(".")[2], None)
    importlib.invalidate_caches()
    importlib.reload(package)
    for name in below:
        importlib.import_module(name)


def _put_back(old: Modules) -> None:
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(old)
    for name, module in old.items():
        parent, _, child = name.rpartition(".")
        if parent:
            vars(old[parent])[child] = module


def _renewed_classes(old: Modules, new: Modules) -> dict[type, type]:
    """Old class -> new class, for all that still exist under their name."""
    found = {}
    for name in old.keys() & new.keys():
        for key, value in list(vars(old[name]).items()):
            own = isinstance(value, type) and value.__module__ == name
            replacement = vars(new[name]).get(key) if own else None
            if isinstance(replacement, type) and replacement is not value:
                found[value] = replacement
    return found


def _renew_instances(classes: dict[type, type]) -> None:
    for thing in gc.get_objects():
        if (replacement := classes.get(type(thing))) is not None:
            try:
                object.__setattr__(thing, "__class__", replacement)
            except TypeError as error:  # its layout changed: the old object goes on with the old code
                log.warning("an open %s keeps its old code: %s", type(thing).__name__, error)


def _renew_names(namespace: dict[str, Any], old: Modules, new: Modules) -> None:
    """Names of the notebook that stand for a module, class or function of the package."""
    for key, value in list(namespace.items()):
        if isinstance(value, ModuleType):
            if old.get(value.__name__) is value and value.__name__ in new:
                namespace[key] = new[value.__name__]
        elif (home := getattr(value, "__module__", None)) in old and home in new:
            name = getattr(value, "__qualname__", None)
            if name and vars(old[home]).get(name) is value and name in vars(new[home]):
                namespace[key] = vars(new[home])[name]


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    return f"{type(error).__name__}: {error}"
