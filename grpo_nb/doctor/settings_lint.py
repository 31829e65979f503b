"""Finds settings that conflict: of a configuration, or as they stand in a notebook, a script or a config.json.

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
from grpo_nb.printable import cut
from grpo_nb.rules import worst_first
from grpo_nb.rules.finding import Finding, Severity
from grpo_nb.run import places
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.settings import plain, restored
from grpo_nb.storage import safe_open

LARGEST = 16 << 20
"""Bytes of a file that is read."""
GROUPS = frozenset(Config.model_fields)
CLASS_DEFAULTS = "the class defaults"
_INVALID = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
"""Exceptions that a literal, or a setting of any size and depth, can raise; a ConfigError is a ValueError."""


def lint(source: Config | Run | str | Path, preset: str | None = None) -> list[Finding]:
    """Findings about settings that are refused (error), or have no effect or undo each other (warning).

    Args:
        source: a configuration, a Run, its folder, or a file: a notebook, a Python script, or a config.json.
        preset: the preset that completes the settings of a file; None: the one that the file names, else the class
            defaults (see `completed_with`).

    Raises:
        RunError: the file or run does not exist, or it is too large.
        ValueError: the preset does not exist.
    """
    if isinstance(source, Config | Run):
        return [*idle(source if isinstance(source, Config) else source.config)]
    base = None if preset is None else _named(preset)
    path = places.as_path(source)
    if not path.is_file():
        if missing := places.missing_file(path):
            raise RunError(missing)
        return [*idle(Run.open(source).config)]
    if path.suffix == ".json":
        return worst_first([*_of_tree(_text(path), base)])
    return worst_first([*_of_code(_trees(path), base)])


def completed_with(source: str | Path, preset: str | None = None) -> str | None:
    """Source of the settings that a file leaves out: `preset demo`, or the class defaults; None for a run.

    Raises:
        RunError: the file cannot be read.
    """
    path = places.as_path(source)
    if not path.is_file():
        return None
    named = None if path.suffix == ".json" else next(filter(None, (_preset(tree) for _, tree in _trees(path))), None)
    found = preset or named
    return f"preset {found}" if found else CLASS_DEFAULTS


def _named(preset: str) -> Config:
    if preset not in presets.PRESETS:
        raise ValueError(f"no preset {preset!r}; use one of {', '.join(presets.PRESETS)}")
    return presets.PRESETS[preset]()


def _text(path: Path) -> str:
    return safe_open.read(path.resolve(), LARGEST).decode("utf-8", errors="replace")


def _trees(path: Path) -> list[tuple[str, ast.AST]]:
    """The syntax trees of a script or a notebook's cells, each with its name."""
    text = _text(path)
    cells = _cells(text) if path.suffix == ".ipynb" else [(path.name, text)]
    return [(name, tree) for name, source in cells if (tree := _parsed(source)) is not None]


def idle(config: Config, severity: Severity = "warning") -> Iterator[Finding]:
    """One finding for each setting that has no effect, or undoes another, with the other settings."""
    for note in config.unused_settings():
        yield Finding("idle_setting", severity, None, f"{note}.", {}, "leave it out, or set what it needs", "none")


def _idle_in(where: str, config: Config, base: Config) -> Iterator[Finding]:
    """Findings that the changes of `base` add, each with its place."""
    before = {*base.unused_settings()}
    for finding in idle(config):
        if finding.message.removesuffix(".") not in before:
            yield replace(finding, message=f"{where}{finding.message}")


def _of_tree(text: str, base: Config | None) -> Iterator[Finding]:
    try:
        tree = json.loads(text)
        if base is not None and isinstance(tree, dict):
            tree = _completed(tree, plain(base))
        yield from idle(restored(tree))
    except _INVALID as error:
        yield from _refused("", error)


def _completed(tree: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """The groups of `tree` completed; objectives are its own or the base's, never both."""
    merged = {
        name: {**base[name], **group} if isinstance(group, dict) and isinstance(base.get(name), dict) else group
        for name, group in tree.items()
        if name != "objectives"
    }
    return base | tree | merged


def _of_code(trees: list[tuple[str, ast.AST]], base: Config | None) -> Iterator[Finding]:
    if base is None:
        preset = next(filter(None, (_preset(tree) for _, tree in trees)), None)
        base = Config() if preset is None else presets.PRESETS[preset]()
    for name, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and (keys := _settings_in(node)):
                where = f"{name}, line {node.lineno}: "
                try:
                    if changes := _literals(keys):
                        yield from _idle_in(where, base.replace(**changes), base)
                except _INVALID as error:
                    yield from _refused(where, error)


def _refused(where: str, error: BaseException) -> Iterator[Finding]:
    """A finding for each line of the error: a configuration's has one for each setting."""
    known = isinstance(error, ConfigError) and str(error)
    text = known or f"a value cannot be read: {str(error) or type(error).__name__}"
    for line in text.split("\n"):
        yield Finding("setting_refused", "error", None, f"{where}{line}", {}, "change what the message names", "none")


def _cells(text: str) -> list[tuple[str, str]]:
    """The code cells of a notebook, each with its number."""
    try:
        cells = json.loads(text)["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError("the file ends in .ipynb and is no notebook; save it again in Jupyter") from None
    return [(f"cell {n}", source) for n, (kind, source) in enumerate(sources, 1) if kind == "code"]


def _parsed(source: str) -> ast.AST | None:
    """The syntax tree, lines for IPython left out; None where it does not parse, which is no finding."""
    lines = ["pass" if line.startswith(("%", "!")) else line for line in source.splitlines()]
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree: ast.AST = compile("\n".join(lines), "cell", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree


def _preset(tree: ast.AST) -> str | None:
    """The preset that is named first: `presets.demo()`, or `PRESET = "demo"`."""
    for node in ast.walk(tree):
        name: Any = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "presets":
            name = node.attr
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name = node.value.value if any(getattr(t, "id", "") == "PRESET" for t in node.targets) else None
        if isinstance(name, str) and name in presets.PRESETS:
            return name
    return None


def _settings_in(node: ast.Dict) -> dict[str, ast.expr]:
    """The items with dotted settings as keys."""
    items = ((getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True))
    texts = [(name, value) for name, value in items if isinstance(name, str)]
    return {name: value for name, value in texts if "." in name and name.partition(".")[0] in GROUPS}


def _literals(items: dict[str, ast.expr]) -> dict[str, Any]:
    """Entries whose values are literals; a value that Python itself refuses, e.g. a list as a key, raises."""
    found: dict[str, Any] = {}
    for name, value in items.items():
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:  # no literal: only running the file gives the value
            continue
        except TypeError as error:
            raise ConfigError(f"{cut(name)}: Python cannot build this value ({error})") from None
    return found
