"""The architecture: imports go down or stay on their floor, without circles; the library is quiet and pickle-free."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "grpo_nb"

FLOORS = (
    {"types", "spelling", "terminal", "algorithms", "losses", "control", "combine", "seeding"},
    {"config", "presets", "tasks", "rewards", "reward_notes", "judge", "findings", "intervals", "scoring", "reads"}
    | {"background", "foreign"},
    {
        "model",
        "silence",
        "rounding",
        "loading",
        "adapters",
        "adapter_files",
        "quantised",
        "turns",
        "codec",
        "shapes",
        "memory",
        "rollout",
        "optim",
    }
    | {"clock", "origins", "digests", "ledger"}
    | {"run", "standing", "durable", "lines", "journal", "index", "checkpoints", "knobs", "lock", "frozen", "sources"}
    | {"regular", "schema", "documents"},
    {
        "sft",
        "train",
        "training",
        "loop",
        "objectives",
        "experience",
        "gradients",
        "gradient_report",
        "guards",
        "metrics",
    }
    | {
        "evaluate",
        "paired",
        "dominance",
        "pareto",
        "quick",
        "probe",
        "workbench",
        "rules",
        "history",
        "symptoms",
        "judge_rules",
    }
    | {"numeric_rules", "regressions", "hindsight"}
    | {"warmup", "doctor", "orders", "preflight", "dependencies"},
    {
        "session",
        "workers",
        "ending",
        "kernel",
        "reloading",
        "report",
        "rollouts_view",
        "tables",
        "markup",
        "exhibits",
        "plots",
        "render",
    }
    | {"widgets", "cli", "__main__"}
    | {"project", "bench", "live_bench", "live_growth", "growth_bench", "promise", "docs"},
)
"""Rooms by floor: a room is a file, or a folder with all that is in it. A new room gets its line here."""
LEVEL = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LOBBY = "__init__"
"""`grpo_nb/__init__.py` opens any room when asked; nothing inside the house goes through it."""

MATHEMATICS = FLOORS[0]
MATHEMATICS_MAY_IMPORT = {"torch", "jaxtyping", "torchjd", *sys.stdlib_module_names}
MAY_PRINT = {"cli"}
MAX_LINES = 450

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())


def module_of(path: Path) -> list[str]:
    """`grpo_nb/tasks/bbq.py` -> ["grpo_nb", "tasks", "bbq"]; a package's `__init__` is the package."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == LOBBY else parts


def room_of(module: list[str]) -> str:
    return module[1] if len(module) > 1 else LOBBY


def imported(path: Path, tree: ast.AST) -> Iterator[list[str]]:
    """Every module that a file imports anywhere, dotted parts, relative ones resolved."""
    package = module_of(path) if path.stem == LOBBY else module_of(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            # `from grpo_nb import losses` names a room, `from grpo_nb.losses import reduce` a thing inside one
            yield from ([*base, alias.name] if base == [PACKAGE] else base for alias in node.names)


def rooms_used(path: Path, tree: ast.AST) -> set[str]:
    own = room_of(module_of(path))
    return {room_of(module) for module in imported(path, tree) if module[0] == PACKAGE} - {own, "__version__"}


def climbs(path: Path, tree: ast.AST) -> list[str]:
    """One sentence for every import that does not go down or stay level."""
    own, name = room_of(module_of(path)), path.relative_to(ROOT).as_posix()
    if own == LOBBY:
        return []
    if own not in LEVEL:
        return [f"{name} is in no floor: add '{own}' to FLOORS in tests/test_floors.py"]
    return [
        f"{name} (floor {LEVEL[own]}) imports {PACKAGE}.{used} (floor {LEVEL.get(used, 'unknown')}): "
        "imports only go down; move the code, or pass what is needed as an argument"
        for used in sorted(rooms_used(path, tree))
        if LEVEL.get(used, len(FLOORS)) > LEVEL[own]
    ]


def forbidden_calls(tree: ast.AST) -> set[str]:
    """`pickle` in any form, and torch's pickling `save` and `load`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            found |= {f"torch.{node.attr}"} & {"torch.save", "torch.load"}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & {"pickle", "cPickle", "dill", "cloudpickle", "joblib"}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} & {"torch.save", "torch.load"}
            found |= names | {node.module or ""} & {"pickle", "dill", "cloudpickle", "joblib"}
    return found


@each_file
def test_imports_go_down(path: Path) -> None:
    problems = climbs(path, TREES[path])
    assert not problems, "\n".join(problems)


def test_no_circles_between_rooms() -> None:
    uses: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        uses.setdefault(room_of(module_of(path)), set()).update(rooms_used(path, tree))
    uses.pop(LOBBY)
    while leaves := {room for room, used in uses.items() if not used & uses.keys()}:
        uses = {room: used for room, used in uses.items() if room not in leaves}
    assert not uses, f"circular imports among {sorted(uses)}"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if room_of(module_of(path)) in MATHEMATICS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_the_mathematics_knows_only_torch(path: Path) -> None:
    strangers = {module[0] for module in imported(path, TREES[path])} - MATHEMATICS_MAY_IMPORT - {PACKAGE}
    assert not strangers, f"{path.name} (floor 0) imports {sorted(strangers)}; floor 0 has torch and torchjd only"


@each_file
def test_the_library_does_not_print(path: Path) -> None:
    lines = [
        node.lineno
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not lines or room_of(module_of(path)) in MAY_PRINT, f"{path.name}: print() in lines {lines}; use logging"


@each_file
def test_nothing_is_pickled(path: Path) -> None:
    assert not forbidden_calls(TREES[path]), (
        f"{path.name} uses {forbidden_calls(TREES[path])}; safetensors and json only"
    )


@each_file
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < MAX_LINES, f"{path.name} has {lines} lines; {MAX_LINES} is the limit: split it"


def test_import_is_silent_and_light() -> None:
    heavy = ("torch", "transformers", "matplotlib", "pandas", "ipywidgets")
    code = f"import sys, {PACKAGE}; sys.exit(' '.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr.strip(), done.returncode) == ("", "", 0)


# ---- the checks themselves catch what they are for


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        (
            "losses.py",
            "from grpo_nb.training.grpo import grpo",
            "grpo_nb/losses.py (floor 0) imports grpo_nb.training.grpo (floor 3)",
        ),
        ("train.py", "import grpo_nb.jupyter.dashboard", "train.py (floor 3) imports grpo_nb.widgets (floor 4)"),
        ("tasks/bbq.py", "from ..model import Policy", "tasks/bbq.py (floor 1) imports grpo_nb.policy.model (floor 2)"),
        ("tasks/bbq.py", "from .. import session", "tasks/bbq.py (floor 1) imports grpo_nb.jupyter.session (floor 4)"),
        (
            "model.py",
            "def f():\n    from grpo_nb import sft",
            "model.py (floor 2) imports grpo_nb.training.sft (floor 3)",
        ),
        ("train.py", "import grpo_nb", "train.py (floor 3) imports grpo_nb.__init__ (floor unknown)"),
        ("attic.py", "", "grpo_nb/attic.py"),
    ],
)
def test_a_climbing_import_is_named(file: str, source: str, message: str) -> None:
    (problem,) = climbs(ROOT / PACKAGE / file, ast.parse(source))
    assert message in problem


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "train.py",
            "from grpo_nb import losses\nfrom grpo_nb.policy.model import Policy\nfrom grpo_nb.training.sft import sft",
        ),
        ("tasks/__init__.py", "from .bbq import BBQ\nfrom grpo_nb.tasks.halueval import HaluEvalQA"),
        ("__init__.py", "from grpo_nb.jupyter.session import start"),
    ],
)
def test_going_down_and_staying_level_is_fine(file: str, source: str) -> None:
    assert climbs(ROOT / PACKAGE / file, ast.parse(source)) == []


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import dumps", "import torch\ntorch.save(1, 2)", "from torch import load"]
)
def test_pickling_is_seen(source: str) -> None:
    assert forbidden_calls(ast.parse(source))
