"""The architecture: imports go down or stay in their layer, without circles; the library is quiet and pickle-free."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import nodes, tree_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "grpo_nb"

LAYERS = (
    {"types", "seeding", "suggest", "printable", "fingerprint"}
    | {"algorithms", "losses", "combine_gradients", "beta_control", "optim", "storage", "metrics"},
    {"config", "presets", "tasks", "rewards", "judge", "plots"},
    {"policy", "rollout", "passes", "run", "ranks"},
    {"preflight", "evaluation", "rules", "training", "doctor", "trackers"},
    {"report", "exports", "sweeps", "jupyter", "cli", "fault_lab", "dev", "__main__"},
)
"""The tree by layer, lowest first: a name is a file, or a folder with all that is in it."""
LEVEL = {name: layer for layer, names in enumerate(LAYERS) for name in names}
PUBLIC = "__init__"
"""`grpo_nb/__init__.py` imports anything when asked; nothing inside the package imports it."""

MATHEMATICS = {"seeding", "algorithms", "losses", "combine_gradients", "beta_control", "optim"}
MATHEMATICS_MAY_IMPORT = {"torch", "jaxtyping", "torchjd", *sys.stdlib_module_names}
MAY_PRINT = {"cli"}
MAX_LINES = 450
MAX_PARAMETERS = 6
PUBLIC_VERBS = {
    "training/grpo.py": {"grpo"},
    "evaluation/evaluate.py": {"evaluate"},
    "jupyter/start.py": {"start"},
}
"""Called by hand in a notebook, each with one or two of its keywords, all but the first optional: a record around
them would be one more thing to know and to import."""

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())


def module_of(path: Path) -> list[str]:
    """`grpo_nb/tasks/bbq.py` -> ["grpo_nb", "tasks", "bbq"]; a package's `__init__` is the package."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == PUBLIC else parts


def entry_of(module: list[str]) -> str:
    return module[1] if len(module) > 1 else PUBLIC


def imported(path: Path, tree: ast.AST) -> Iterator[list[str]]:
    """Every module that a file imports anywhere, dotted parts, relative ones resolved."""
    package = module_of(path) if path.stem == PUBLIC else module_of(path)[:-1]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            # `from grpo_nb import losses` names an entry, `from grpo_nb.losses import reduce` a thing inside one
            yield from ([*base, alias.name] if base == [PACKAGE] else base for alias in node.names)


def entries_used(path: Path, tree: ast.AST) -> set[str]:
    own = entry_of(module_of(path))
    return {entry_of(module) for module in imported(path, tree) if module[0] == PACKAGE} - {own, "__version__"}


def climbs(path: Path, tree: ast.AST) -> list[str]:
    """One sentence for every import that does not go down or stay in its layer."""
    own, name = entry_of(module_of(path)), path.relative_to(ROOT).as_posix()
    if own == PUBLIC:
        return []
    if own not in LEVEL:
        return [f"{name} is in no layer: add '{own}' to LAYERS in tests/test_layers.py"]
    return [
        f"{name} (layer {LEVEL[own]}) imports {PACKAGE}.{used} (layer {LEVEL.get(used, 'unknown')}): "
        "imports only go down; move the code, or pass what is needed as an argument"
        for used in sorted(entries_used(path, tree))
        if LEVEL.get(used, len(LAYERS)) > LEVEL[own]
    ]


def forbidden_calls(tree: ast.AST) -> set[str]:
    """`pickle` in any form, and torch's pickling `save` and `load`."""
    found: set[str] = set()
    for node in nodes(tree):
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
    problems = climbs(path, tree_of(path))
    assert not problems, "\n".join(problems)


def test_no_circles_between_entries() -> None:
    uses: dict[str, set[str]] = {}
    for path, tree in zip(FILES, map(tree_of, FILES), strict=True):
        uses.setdefault(entry_of(module_of(path)), set()).update(entries_used(path, tree))
    uses.pop(PUBLIC)
    while leaves := {entry for entry, used in uses.items() if not used & uses.keys()}:
        uses = {entry: used for entry, used in uses.items() if entry not in leaves}
    assert not uses, f"circular imports among {sorted(uses)}"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if entry_of(module_of(path)) in MATHEMATICS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_the_mathematics_knows_only_torch(path: Path) -> None:
    strangers = {module[0] for module in imported(path, tree_of(path))} - MATHEMATICS_MAY_IMPORT - {PACKAGE}
    assert not strangers, f"{path.name} imports {sorted(strangers)}; the mathematics has torch and torchjd only"


@each_file
def test_the_library_does_not_print(path: Path) -> None:
    lines = [
        node.lineno
        for node in nodes(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not lines or entry_of(module_of(path)) in MAY_PRINT, f"{path.name}: print() in lines {lines}; use logging"


@each_file
def test_nothing_is_pickled(path: Path) -> None:
    assert not forbidden_calls(tree_of(path)), (
        f"{path.name} uses {forbidden_calls(tree_of(path))}; safetensors and json only"
    )


@each_file
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < MAX_LINES, f"{path.name} has {lines} lines; {MAX_LINES} is the limit: split it"


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    own = function.args
    named = [argument.arg for argument in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    return [name for name in named if name not in ("self", "cls")] + [a.arg for a in (own.vararg, own.kwarg) if a]


def crowded(tree: ast.AST) -> dict[str, int]:
    """Functions with more than `MAX_PARAMETERS`, and how many they have; a GPU's kernels can take no records."""
    functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [f for f in functions if not any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)]
    return {f.name: len(parameters(f)) for f in functions if len(parameters(f)) > MAX_PARAMETERS}


@each_file
def test_functions_take_few_parameters(path: Path) -> None:
    found = crowded(tree_of(path)).keys() - PUBLIC_VERBS.get(path.relative_to(ROOT / PACKAGE).as_posix(), set())
    assert not found, f"{path.name}: {sorted(found)} take more than {MAX_PARAMETERS}: pass a record"


def test_import_is_silent_and_light() -> None:
    heavy = ("torch", "transformers", "matplotlib", "pandas", "ipywidgets")
    code = f"import sys, {PACKAGE}; sys.exit(' '.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr.strip(), done.returncode) == ("", "", 0)


# ---- the checks themselves catch what they are for


@pytest.mark.parametrize(
    ("file", "source", "names"),
    [
        ("losses/kl.py", "from grpo_nb.training.grpo import grpo", ("grpo_nb/losses/kl.py", "grpo_nb.training")),
        ("training/grpo.py", "import grpo_nb.jupyter.dashboard", ("training/grpo.py", "grpo_nb.jupyter")),
        ("tasks/bbq.py", "from ..policy.model import Policy", ("tasks/bbq.py", "grpo_nb.policy")),
        ("tasks/bbq.py", "from .. import jupyter", ("tasks/bbq.py", "grpo_nb.jupyter")),
        ("policy/model.py", "def f():\n    from grpo_nb import training", ("policy/model.py", "grpo_nb.training")),
        ("training/grpo.py", "import grpo_nb", ("training/grpo.py", "grpo_nb.__init__")),
        ("attic.py", "", ("grpo_nb/attic.py", "LAYERS")),
    ],
)
def test_a_climbing_import_is_named(file: str, source: str, names: tuple[str, ...]) -> None:
    (problem,) = climbs(ROOT / PACKAGE / file, ast.parse(source))
    assert all(name in problem for name in names)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "training/grpo.py",
            "from grpo_nb import losses\nfrom grpo_nb.policy import model\nimport grpo_nb.rules",
        ),
        ("tasks/__init__.py", "from .bbq import BBQ\nfrom grpo_nb.tasks.halueval import HaluEvalQA"),
        ("__init__.py", "from grpo_nb.jupyter.start import start"),
    ],
)
def test_going_down_and_staying_level_is_fine(file: str, source: str) -> None:
    assert climbs(ROOT / PACKAGE / file, ast.parse(source)) == []


def test_the_top_has_at_most_a_dozen_files() -> None:
    assert len([path for path in FILES if path.parent == ROOT / PACKAGE]) <= 12


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import dumps", "import torch\ntorch.save(1, 2)", "from torch import load"]
)
def test_pickling_is_seen(source: str) -> None:
    assert forbidden_calls(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(a, b, c, d, e, f): ...", 0),
        ("def f(a, b, c, d, e, f, g): ...", 7),
        ("def f(a, /, b, c, *, d, e, f, g): ...", 7),
        ("async def f(a, b, c, d, e, *more, **most): ...", 7),
        ("class A:\n    def f(self, a, b, c, d, e, f): ...", 0),
        ("class A:\n    def f(self, a, b, c, d, e, f, g): ...", 7),
    ],
)
def test_parameters_are_counted(source: str, count: int) -> None:
    assert sum(crowded(ast.parse(source)).values()) == count
