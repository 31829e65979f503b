"""Settings that fight each other: of a configuration, or as they stand in a notebook, a script or a config.json.

A file is read as text and none of it is run: dictionaries of literals whose keys are dotted settings, and the name of
the preset that they change.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_nb import presets
from grpo_nb.config import Config, ConfigError
from grpo_nb.rules import worst_first
from grpo_nb.rules.finding import Finding, Severity
from grpo_nb.run import places
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.settings import restored
from grpo_nb.storage import safe_open

LARGEST = 16 << 20
"""Bytes of a file that is read."""
GROUPS = frozenset(Config.model_fields)


def lint(source: Config | Run | str | Path) -> list[Finding]:
    """Settings that are refused (error), or that do nothing or undo each other beside the others (warning).

    Args:
        source: a configuration, a Run, its folder, or a file: a notebook, a Python script, or a config.json.

    Raises:
        RunError: there is no such file or run, or it is too large.
    """
    if isinstance(source, Config | Run):
        return [*idle(source if isinstance(source, Config) else source.config)]
    path = places.as_path(source)
    if not path.is_file():
        return [*idle(Run.open(source).config)]
    text = safe_open.read(path.resolve(), LARGEST).decode("utf-8", errors="replace")
    if path.suffix == ".json":
        return worst_first([*_of_tree(text)])
    cells = _cells(text) if path.suffix == ".ipynb" else [(path.name, text)]
    return worst_first([*_of_code(cells)])


def idle(config: Config, severity: Severity = "warning") -> Iterator[Finding]:
    """A finding for each setting that does nothing, or undoes another, beside the others."""
    for note in config.unused_settings():
        yield Finding("idle_setting", severity, None, f"{note}.", {}, "leave it out, or set what it needs", "none")


def _idle_in(where: str, config: Config, base: Config) -> Iterator[Finding]:
    """Those that the changes of `base` bring, each with its place."""
    before = {*base.unused_settings()}
    for finding in idle(config):
        if finding.message.removesuffix(".") not in before:
            yield replace(finding, message=f"{where}{finding.message}")


def _of_tree(text: str) -> Iterator[Finding]:
    try:
        yield from idle(restored(json.loads(text)))
    except (ConfigError, ValueError, RecursionError) as error:
        yield _refused("", error)


def _of_code(cells: list[tuple[str, str]]) -> Iterator[Finding]:
    trees = [(name, tree) for name, source in cells if (tree := _parsed(source)) is not None]
    base = next((config for _, tree in trees if (config := _preset(tree)) is not None), Config())
    for name, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and (changes := _literal_settings(node)):
                where = f"{name}, line {node.lineno}: "
                try:
                    yield from _idle_in(where, base.replace(**changes), base)
                except ConfigError as error:
                    yield _refused(where, error)


def _refused(where: str, error: Exception) -> Finding:
    return Finding("setting_refused", "error", None, f"{where}{error}", {}, "change what the message names", "none")


def _cells(text: str) -> list[tuple[str, str]]:
    """The code cells of a notebook, each with its number."""
    try:
        cells = json.loads(text)["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError("the file ends in .ipynb and is no notebook; save it again in Jupyter") from None
    return [(f"cell {n}", source) for n, (kind, source) in enumerate(sources, 1) if kind == "code"]


def _parsed(source: str) -> ast.AST | None:
    """The syntax tree, lines for IPython left out; None where it does not parse, which says nothing of settings."""
    lines = ["pass" if line.startswith(("%", "!")) else line for line in source.splitlines()]
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree: ast.AST = compile("\n".join(lines), "cell", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree


def _preset(tree: ast.AST) -> Config | None:
    """The preset that is named first: `presets.demo()`, or `PRESET = "demo"`."""
    for node in ast.walk(tree):
        name: Any = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "presets":
            name = node.attr
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name = node.value.value if any(getattr(t, "id", "") == "PRESET" for t in node.targets) else None
        if isinstance(name, str) and name in presets.PRESETS:
            return presets.PRESETS[name]()
    return None


def _literal_settings(node: ast.Dict) -> dict[str, Any]:
    """The items with dotted settings as keys and literal values."""
    found: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        if isinstance(name, str) and "." in name and name.partition(".")[0] in GROUPS:
            try:
                found[name] = ast.literal_eval(value)
            except ValueError:
                continue
    return found
