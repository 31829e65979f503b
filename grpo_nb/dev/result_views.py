"""The measured result as notebook 07 shows it, read from notebooks/result alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb import fingerprint
from grpo_nb.plots.canvas import Picture
from grpo_nb.plots.spread import spread
from grpo_nb.report.tables import Table
from grpo_nb.storage.files import RunError

FOLDER = fingerprint.ROOT.parent / "notebooks" / "result"
BASE, GRPO = ("sft", "base"), ("grpo", "latest")
ARMS = {
    BASE: "as loaded",
    ("sft", "sft"): "SFT, a third of the gold answers",
    ("sft-same-seconds", "sft"): "SFT continued for GRPO's seconds",
    ("sft-same-examples", "sft"): "SFT, all gold answers",
    GRPO: "GRPO from SFT",
    ("no-kl", "latest"): "GRPO without KL",
}
_NAMES = {arm for arm, _ in ARMS}
MEASURES = {
    ("fairness", "accuracy_ambiguous"): "BBQ ambiguous, right",
    ("fairness", "accuracy_disambiguated"): "BBQ disambiguated, right",
    ("fairness", "unknown_rate_disambiguated"): '"unknown" where the text tells',
    ("fairness", "bias_ambiguous"): "s_AMB",
    ("fairness", "bias_disambiguated"): "s_DIS",
    ("hallucination", "accuracy"): "QA, right",
    ("hallucination", "grounded_rate"): "QA, right and quoted",
    ("hallucination", "hallucinated_rate"): "QA, wrong or made up",
    ("hallucination", "abstention_rate"): "QA, abstained",
    ("unseen", "accuracy_ambiguous"): "unseen category, ambiguous, right",
    ("unseen", "accuracy_disambiguated"): "unseen category, disambiguated, right",
    ("recognition", "accuracy"): "recognition, right",
    ("recognition", "length_accuracy"): "recognition by length alone",
    ("probe", "accuracy"): "general probe, right",
}


def table() -> Table:
    """A row for each measure, a column for each arm: mean over seeds with its 95% interval."""
    return _shown(("value", "low", "high"), "mean over seeds [95% interval]")


def differences() -> Table:
    """Differences from GRPO by arm, paired by seed and item; * where the interval leaves out 0."""
    return _shown(
        ("difference", "difference_low", "difference_high"), "less GRPO, paired [95% interval]; * leaves out 0"
    )


def seeds() -> Table:
    """Steps that each run of GRPO reached."""
    rows = _read("curves.csv")
    steps = rows[rows["arm"].isin(_NAMES)].groupby(["arm", "seed"], sort=False)["step"].max()
    return Table(steps.unstack("seed").reset_index(), "steps of GRPO by seed")


def curves(*keys: str) -> Picture:
    """Curves of the arms over the steps: the mean of the seeds, and their spread."""
    rows = _read("curves.csv")
    rows = rows[rows["arm"].isin(_NAMES)]
    by_key: dict[str, dict[str, list[tuple[Any, Any]]]] = {}
    for key in keys:
        lines = rows[rows[key].notna()].groupby(["arm", "seed"], sort=False)
        for (arm, _), own in lines:
            steps, values = (own[name].to_numpy(np.float64) for name in ("step", key))
            by_key.setdefault(key, {}).setdefault(arm, []).append((steps, values))
    return spread(by_key, rows["seed"].nunique())


def front(seed: int) -> pd.DataFrame:
    """Result of `pareto.pareto` for the quick evaluations of one seed's GRPO."""
    rows = _read("front.csv", keep_default_na=False)
    own = rows[rows["seed"] == seed].drop(columns="seed").reset_index(drop=True)
    numbers = [name for name in own if "/" in str(name)]
    return own.astype(dict.fromkeys(numbers, float))


def examples() -> Table:
    """The first held-out items of each objective, with the model's answers before and after."""
    return Table(_read("examples.csv").fillna(""), "the first of each objective in the seeded order, seed 0")


def _shown(columns: Sequence[str], caption: str) -> Table:
    rows = _read("results.csv").set_index(["arm", "stage", "objective", "metric"])
    lines = []
    for (objective, metric), meaning in MEASURES.items():
        cells = {name: _cell(rows, (*arm, objective, metric), columns) for arm, name in ARMS.items()}
        lines.append({"measure": meaning} | cells)
    return Table(pd.DataFrame(lines), caption)


def _cell(rows: pd.DataFrame, key: tuple[str, ...], columns: Sequence[str]) -> str:
    if key not in rows.index:
        return ""
    value, low, high = (float(rows.loc[key, name]) for name in columns)
    if math.isnan(value):
        return ""
    star = "*" if columns[0] == "difference" and rows.loc[key, "differs"] is True else ""
    return _two(value) if math.isnan(low) else f"{_two(value)} [{_two(low)}, {_two(high)}]{star}"


def _two(value: float) -> str:
    """Two decimals, without the sign of a zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def _read(name: str, **options: Any) -> pd.DataFrame:
    path = FOLDER / name
    if not path.exists():
        raise RunError(
            f"{path} is missing: the measured result comes with a clone of the project; clone it, or make your own "
            f"with python -m grpo_nb.dev.result STUDY --take {Path('notebooks/result')}"
        )
    return pd.read_csv(path, **options)
