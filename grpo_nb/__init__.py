"""GRPO post-training of language models in Jupyter notebooks.

    from grpo_nb import presets, Run, start
    run = Run.create("runs/demo", presets.demo())
    session = start(run)                 # trains in a thread; the notebook stays free
    session.dashboard()                  # KL, beta, reward, sliders
    await session.wait()

Importing this does no work: each name below is loaded when it is first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grpo_nb import fingerprint

__version__ = "0.1.0"

if TYPE_CHECKING:
    from grpo_nb import presets as presets
    from grpo_nb.config import Config as Config
    from grpo_nb.doctor import diagnose as diagnose
    from grpo_nb.evaluation.evaluate import evaluate as evaluate
    from grpo_nb.exports import export as export
    from grpo_nb.jupyter.dashboard import Dashboard as Dashboard
    from grpo_nb.jupyter.reload import reload as reload
    from grpo_nb.jupyter.start import attach as attach
    from grpo_nb.jupyter.start import start as start
    from grpo_nb.jupyter.workers import release as release
    from grpo_nb.policy.memory import plan as plan
    from grpo_nb.policy.model import load_policy as load_policy
    from grpo_nb.report.run_comparison import compare as compare
    from grpo_nb.run.run import Run as Run
    from grpo_nb.sweeps import sweep as sweep
    from grpo_nb.training.grpo import grpo as grpo
    from grpo_nb.training.sft import sft as sft
    from grpo_nb.types import Example as Example
    from grpo_nb.types import Score as Score

_HOME = {
    "Config": "config",
    "Dashboard": "jupyter.dashboard",
    "Example": "types",
    "Run": "run.run",
    "Score": "types",
    "attach": "jupyter.start",
    "compare": "report.run_comparison",
    "diagnose": "doctor",
    "evaluate": "evaluation.evaluate",
    "export": "exports",
    "grpo": "training.grpo",
    "load_policy": "policy.model",
    "plan": "policy.memory",
    "presets": "",
    "release": "jupyter.workers",
    "reload": "jupyter.reload",
    "sft": "training.sft",
    "start": "jupyter.start",
    "sweep": "sweeps",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'grpo_nb' has no attribute {name!r}; it has: {', '.join(__all__)}")
    if not _HOME[name]:
        return import_module(f"grpo_nb.{name}")
    return getattr(import_module(f"grpo_nb.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """Package module that notes each submodule when it is loaded: Python binds it to its package then."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, ModuleType):
            fingerprint.note(value.__name__)
            if hasattr(value, "__path__"):
                value.__class__ = _Package


sys.modules[__name__].__class__ = _Package
fingerprint.note()
if "ipykernel" in sys.modules:  # in a notebook, what there is to resume is listed under the cell that imports first
    import_module("grpo_nb.jupyter.kernel").welcome()
