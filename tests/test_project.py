"""The project around the code: one list of dependencies, an environment that points to it, targets that exist."""

import ast
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tokenize
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rattler import MatchSpec

import grpo_nb
from grpo_nb import presets
from grpo_nb.cli.arguments import commands
from grpo_nb.config import Config, parse
from grpo_nb.config.setting_keys import settings
from grpo_nb.dev import docs
from tests.conftest import LONGEST, ROOT
from tests.support.lowest import constraints

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LISTED = [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
TARGETS = ("run", "lab", "test", "test-browser", "test-lowest", "test-all", "bench", "docs", "format", "help")
MODULE_OF = {
    "pyyaml": "yaml",
    "py-rattler": "rattler",
    "markdown-it-py": "markdown_it",
    "pillow": "PIL",
}
COMES_WITH = {
    "IPython": "ipykernel",
    "jupyter_client": "ipykernel",
    "markdown_it": "rich",
    "tokenizers": "transformers",
    "nbformat": "nbclient",
    "pydantic_core": "pydantic",
    "triton": "torch",  # with builds for CUDA; without it the engine that needs it hands over to another
}
"""Modules that are imported and belong to a package which is listed."""


def module_of(requirement: str) -> str:
    name = Requirement(requirement).name
    return MODULE_OF.get(name, name.replace("-", "_"))


def imported_modules(folder: str) -> set[str]:
    """Third-party modules that any file below `folder` imports, at its top or inside a function."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return {COMES_WITH.get(name, name) for name in found - {"grpo_nb", "tests"} - set(sys.stdlib_module_names)}


# ---- dependencies


def test_the_package_imports_what_is_listed_and_nothing_else() -> None:
    core = {module_of(r) for r in PROJECT["dependencies"]}
    optional = {module_of(r) for name in ("notebook", "judge", "datasets", "gguf", "parity") for r in EXTRAS[name]}
    used = imported_modules("grpo_nb")
    assert used <= core | optional, "imported, not in pyproject.toml"
    assert core <= used, "in pyproject.toml, imported nowhere"


def test_the_tests_import_what_is_listed() -> None:
    listed = set(map(module_of, LISTED))
    assert imported_modules("tests") <= listed


def test_every_dependency_says_why_and_is_capped() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for requirement in LISTED:
        (line,) = (line for line in lines if f'"{requirement}"' in line)
        assert re.search(r"# \w.{4,}", line), f"{requirement} has no reason"
        specifier = Requirement(requirement).specifier
        assert "grpo_nb" in requirement or any(s.operator in (">=", "==") for s in specifier), requirement


def test_torch_range() -> None:
    torch = next(Requirement(r).specifier for r in PROJECT["dependencies"] if Requirement(r).name == "torch")
    assert torch.contains("2.13.0") and torch.contains("2.13.0+cpu") and not torch.contains("3.0")


def test_the_lowest_versions_are_installed_and_tried_with_the_slow_tests(tmp_path: Path) -> None:
    bounds = dict(line.split("==") for line in constraints(ROOT / "pyproject.toml"))
    assert {Requirement(r).name for r in LISTED} == bounds.keys() | {"grpo_nb", "trl"}
    assert all(Version(bounds[name]) <= Version(version(name)) for name in ("torch", "transformers", "peft", "numpy"))
    recipe = make("--dry-run", "test-all", f"VENV={tmp_path}/venv")
    assert recipe.index(f"'torch=={bounds['torch']}'") < recipe.index("constraints.txt --editable")
    tried = set(re.findall(r"tests/\S*test_\w+\.py", recipe))
    assert len(tried) > 15 and all((ROOT / path).is_file() for path in tried)


def test_heavy_or_paid_things_are_optional() -> None:
    core = {Requirement(r).name for r in PROJECT["dependencies"]}
    assert not core & {"openai", "datasets", "gguf", "jupyterlab", "trl", "vllm", "accelerate", "bitsandbytes"}


# ---- environment.yml


def environment() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())
    return loaded


def test_environment_solves_from_conda_forge_alone() -> None:
    assert environment()["channels"] == ["conda-forge", "nodefaults"]


def test_environment_has_conda_specs_that_conda_reads() -> None:
    specs = [MatchSpec(s, strict=True) for s in environment()["dependencies"] if isinstance(s, str)]
    assert [str(spec.name.normalized if hasattr(spec.name, "normalized") else spec.name) for spec in specs] == [
        "python",
        "pip",
    ]


def test_environment_has_the_project_s_python() -> None:
    python = next(s for s in environment()["dependencies"] if str(s).startswith("python"))
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])


def test_environment_lists_no_package_of_its_own() -> None:
    (pip,) = [d["pip"] for d in environment()["dependencies"] if isinstance(d, dict)]
    (line,) = pip
    match = re.fullmatch(r"-e \.\[([\w,]+)\]", line)
    assert match and set(match[1].split(",")) <= EXTRAS.keys()
    assert "notebook" in match[1]


# ---- Makefile and CI


def make(*arguments: str) -> str:
    """Standard output of make as a person starts it, whatever the make around the tests was told."""
    around = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "VENV", "TORCH", "TORCH_INDEX"}
    env = {name: value for name, value in os.environ.items() if name not in around}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_help_lists_every_target() -> None:
    shown = make("help")
    assert all(re.search(rf"^{target} +\w", shown, re.MULTILINE) for target in TARGETS), shown
    assert all(f"  {variable} " in shown for variable in ("PYTHON", "VENV", "TORCH", "TORCH_INDEX"))


@pytest.mark.parametrize("target", TARGETS)
def test_target_makes_its_environment_first(target: str, tmp_path: Path) -> None:
    recipe = make("--dry-run", target, f"VENV={tmp_path}/venv")
    if target != "help":
        made, installed = recipe.index("-m venv"), recipe.index("pip install")
        assert made < installed < len(recipe)
        assert recipe.index("'torch>=") < recipe.index("--editable"), "torch goes in before what depends on it"


def test_run_executes_every_notebook_and_renders_it(tmp_path: Path) -> None:
    recipe = make("--dry-run", "run", f"VENV={tmp_path}/venv")
    names = sorted(p.name for p in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    positions = [recipe.index(f"notebooks/{name}") for name in names]
    assert positions == sorted(positions)
    assert "grpo_nb.dev.render --out build notebooks/" in recipe


def test_test_checks_format_lint_types_and_tests(tmp_path: Path) -> None:
    recipe = make("--dry-run", "test", f"VENV={tmp_path}/venv")
    assert all(step in recipe for step in ("ruff format --check", "ruff check", "mypy", "pytest"))


def test_the_peer_is_installed_for_the_slow_tests_alone(tmp_path: Path) -> None:
    recipes = {target: make("--dry-run", target, f"VENV={tmp_path}/venv") for target in ("test", "test-all")}
    assert "'.[parity]'" in recipes["test-all"] and "'.[parity]'" not in recipes["test"]


def test_browser_tests_are_all_run_by_their_target_and_the_core_by_test(tmp_path: Path) -> None:
    assert "pytest -m browser tests" in make("--dry-run", "test-browser", f"VENV={tmp_path}/venv")
    slow = {path.name for path in (ROOT / "tests").rglob("test_browser*.py") if "pytest.mark.slow" in path.read_text()}
    assert slow == {f"test_browser_{part}.py" for part in ("markup", "panel", "runs", "views")}, (
        "test_browser.py is the core"
    )


def test_an_own_torch_is_taken_as_given(tmp_path: Path) -> None:
    recipe = make(
        "--dry-run", "lab", f"VENV={tmp_path}/venv", "TORCH=torch==2.13.0", "TORCH_INDEX=https://an.index/cpu"
    )
    assert "pip install --quiet --index-url https://an.index/cpu 'torch==2.13.0'" in recipe


def test_ci_script_is_strict_and_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text() and "\nmake test " in script.read_text()


def undefined(*places: str, root: Path = ROOT) -> list[str]:
    """Names that nothing defines. Ruff's own rule is off: it takes the shapes in jaxtyping's strings for names."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "json"]
    done = subprocess.run([*command, *places], cwd=root, capture_output=True, text=True, check=False)
    found: dict[str, list[tuple[tuple[int, int], str]]] = {}
    for one in json.loads(done.stdout):
        place = (one["location"]["row"], one["location"]["column"] - 1)
        found.setdefault(one["filename"], []).append((place, one["message"]))
    real = []
    for name, entries in found.items():
        with tokenize.open(name) as file:
            strings = [(t.start, t.end) for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.STRING]
        real += [f"{name}: {text}" for at, text in entries if not any(a <= at < b for a, b in strings)]
    return real


def test_every_name_is_defined(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('from x import Float, T\n\n\ndef f(a: Float[T, "row"]) -> None:\n    closing(a)\n')
    assert [text.partition(": ")[2] for text in undefined("a.py", root=tmp_path)] == ["Undefined name `closing`"]
    assert undefined("grpo_nb", "tests") == []


def test_licence() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


# ---- the package's front door


def test_every_name_of_the_front_door_opens() -> None:
    for name in grpo_nb.__all__:
        assert getattr(grpo_nb, name) is not None, name
    assert set(grpo_nb.__all__) <= set(dir(grpo_nb))


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'gpro'.*grpo, load_policy"):
        _ = grpo_nb.gpro


def test_no_module_bears_the_name_of_a_verb() -> None:
    """Python would bind the module over the function of that name as soon as anyone imports it."""
    modules = {module.name for module in pkgutil.iter_modules(grpo_nb.__path__)}
    assert modules & set(grpo_nb.__all__) == {"presets"}


# ---- presets and reference pages


@pytest.mark.parametrize("name", presets.PRESETS)
def test_preset_is_a_valid_config_that_survives_json(name: str) -> None:
    config = presets.PRESETS[name]()
    assert parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", presets.PRESETS)
def test_preset_says_hardware_minutes_and_expectation(name: str) -> None:
    text = inspect.getdoc(presets.PRESETS[name]) or ""
    for label in ("Hardware:", "Time:", "Expect:"):
        assert re.search(rf"^{label} \S", text, re.MULTILINE), f"{name} lacks '{label}'"
    assert re.search(r"\d+ (s|minutes|min)\b", text), f"{name} gives no time"
    assert name == "demo" or "easured" in text, f"{name} must say what was measured and what was not"


def test_real_presets_take_own_model_and_data() -> None:
    config = presets.cpu_small(model="models/mine", bbq="here/bbq", halueval="here/qa.json")
    assert config.model.name == "models/mine"
    assert [o.data for o in config.objectives.values()] == ["here/bbq", "here/qa.json"]


def test_reference_pages_hold_every_setting_preset_and_command(tmp_path: Path) -> None:
    written = {path.stem: path.read_text() for path in docs.write(tmp_path)}
    assert all(f"<code>{s.key}</code>" in written["settings"] for s in settings(Config()))
    assert all(f">{name}</h2>" in written["presets"] for name in presets.PRESETS)
    assert all(f">{name}</h2>" in written["commands"] for name in commands())


def test_settings_are_what_replace_takes() -> None:
    config = Config()
    found = settings(config)
    assert len(found) > 50 and all(s.meaning for s in found)
    assert config.replace(**{s.key: s.value for s in found if s.active}) == config


def test_the_files_that_begin_exist() -> None:
    assert {f"test_{name}" for name in LONGEST} <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
