"""The table of metric keys: one row a key, spelt nowhere else, and nothing outside it is written."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_nb import presets
from grpo_nb.metrics import keys
from grpo_nb.metrics.healthy import HEALTHY
from grpo_nb.run.run import Run
from grpo_nb.types import StepStats
from tests.support.sources import nodes, tree_of
from tests.support.tokens import names, pattern

PACKAGE = Path(keys.__file__).parents[1]
TABLES = {Path(keys.__file__), PACKAGE / "storage" / "former_names.py"}
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path not in TABLES)

WORDS = {"rounding"} | {name for name in keys.TABLE if "_" in name and "/" not in name}
"""Keys of one word that mean nothing else; `step`, `loss`, `lr` and others are words of other records too."""
FAMILIES = {name.partition("/")[0] for name in keys.TABLE if "/" in name}


@functools.cache
def constants() -> dict[str, str]:
    """The name in the code of each row of the table."""
    found = {row: name for name, row in vars(keys).items() if isinstance(row, keys.Key)}
    of_row = {row.name: name for row, name in found.items()}
    for name, value in vars(keys).items():
        if isinstance(value, str) and value in keys.TABLE:
            of_row[value] = name
        elif isinstance(value, keys.Difference):
            of_row |= dict.fromkeys((value.mean, value.p99, value.far), name)
    return of_row


def beginnings(tree: ast.AST) -> Iterator[str]:
    """What each string of the code begins with, docstrings left out; of an f-string the text before its first value."""
    inside = {id(part) for node in nodes(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    said = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            yield str(node.values[0].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | said:
            yield node.value


def spelt(tree: ast.AST) -> set[str]:
    """Metric keys, or their beginnings, that a file spells itself."""
    return {
        text
        for text in beginnings(tree)
        if text in WORDS or ("/" in text and " " not in text and text.partition("/")[0] in FAMILIES)
    }


@pytest.mark.parametrize("file", FILES)
def test_no_key_is_spelt_outside_the_table(file: str) -> None:
    assert not spelt(tree_of(PACKAGE / file))


@pytest.mark.parametrize(
    "source",
    [
        'row["kl/fairness"]',
        'f"reward/{name}/mean"',
        'f"reward/{name}/mean" if a else b',
        'number(row, "rounding")',
        'key = "grad/norm"',
    ],
)
def test_a_key_that_is_spelt_is_seen(source: str) -> None:
    assert spelt(ast.parse(source))


@pytest.mark.parametrize("source", ['"""Writes `kl/fairness`."""', 'f"{key}/x"', '"beta is 0"', 'keys.KL.of("a")'])
def test_what_is_no_key_is_passed_over(source: str) -> None:
    assert not spelt(ast.parse(source))


@pytest.mark.parametrize("row", keys.TABLE.values(), ids=list(keys.TABLE))
def test_a_row_is_complete_and_its_producers_use_it(row: keys.Key) -> None:
    assert row.meaning.endswith(".") and row.producers and row.name == row.name.strip()
    name = constants()[row.name]
    for producer in row.producers:
        used = {node.attr for node in nodes(tree_of(PACKAGE / producer)) if isinstance(node, ast.Attribute)}
        assert name in used, f"{producer} does not use keys.{name}"


def test_every_row_says_what_is_healthy() -> None:
    assert HEALTHY.keys() == keys.TABLE.keys()
    assert all(text.endswith(".") for text in HEALTHY.values())


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("loss", "loss"),
        ("loss/policy", "loss/{term}"),
        ("kl/fairness", "kl/{objective}"),
        ("grad/norm", "grad/norm"),
        ("grad/norm/a", "grad/norm/{objective}"),
        ("grad/norm/a/kl", "grad/norm/{objective}/{term}"),
        ("time/step", "time/step"),
        ("time/rollout", "time/{phase}"),
        ("time/judge/a", "time/judge/{objective}"),
        ("judge/a/provider/m@h/v1", "judge/{objective}/provider/{provider}"),
        ("label/a/line\nbreak", "label/{objective}/{label}"),
        ("kl", None),
        ("klx/a", None),
        ("", None),
        ("x" * 500, None),
    ],
)
def test_a_key_is_found(key: str, row: str | None) -> None:
    found = keys.row_of(key)
    assert (found.name if found else None) == row
    assert found is None or found.has(key)


def test_fields_are_filled_in() -> None:
    assert keys.GRAD_COSINE_OF.of("a", "b%s") == "grad/cosine/a/b%s"
    assert keys.GRAD_COSINE_OF.below() == "grad/cosine/" and keys.GRAD_COSINE_OF.below("a") == "grad/cosine/a/"
    with pytest.raises(TypeError):
        keys.KL.of()
    with pytest.raises(TypeError):
        keys.KL.of("a", "b")


@pytest.mark.parametrize("log", ["log_metrics", "log_sft"])
def test_a_row_with_another_key_is_not_written(log: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", presets.demo())
    with pytest.raises(ValueError, match=pattern("los", "loss")):
        getattr(run, log)({"step": 1, "los": 0.5})
    assert run.metric_rows() == run.rows("sft") == []
    getattr(run, log)({"step": 1, keys.LOSS: 0.5, keys.USER.of("fairness", "any name/at all"): 1.0})
    assert len(run.metric_rows() + run.rows("sft")) == 1


def test_a_step_is_shown_in_one_line_with_its_main_numbers() -> None:
    row: dict[str, float | int | str | None] = {f"kl/{n}": None for n in range(40)}
    row |= {f"user/fairness/{n}": 0.5 for n in range(200)} | {"reward/fairness/mean": 0.25, "time/step": 1.5}
    shown = repr(StepStats(3, row, "clipped"))
    assert names(shown, 3, "clipped", "reward/fairness/mean", 0.25, 1.5, len(row))
    assert len(shown) < 200 and "\n" not in shown
