"""A run's metrics as a file that other programs read: CSV, or Parquet."""

import io
from pathlib import Path
from typing import Any

from grpo_nb.run.run import Run
from grpo_nb.storage.safe_open import RunError

ENDINGS = (".csv", ".parquet")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that a spreadsheet takes for the beginning of a formula."""


def is_table(file: str | Path | None) -> bool:
    """Whether a name has the ending of a table."""
    return file is not None and Path(file).suffix.lower() in ENDINGS


def table(run: Run | str | Path, ending: str) -> bytes:
    """metrics.jsonl as a table, a row a step and a column a key, as `run.metrics()` has them.

    In CSV, a text or key that a spreadsheet would compute begins with an apostrophe.

    Args:
        ending: `.csv`, or `.parquet` (which needs pyarrow).

    Raises:
        RunError: the run cannot be opened, or pyarrow is not installed.
    """
    frame = Run.of(run).metrics()
    if ending.lower() == ".csv":
        text: str = frame.map(_plain).rename(columns=_plain).to_csv(index=False)
        return text.encode()
    frame = frame.astype({name: "string" for name in frame if frame[name].dtype == object})
    buffer = io.BytesIO()
    try:
        frame.to_parquet(buffer, index=False, engine="pyarrow")
    except ImportError as error:
        raise RunError(
            f"a .parquet file needs pyarrow, which cannot be imported ({error}). pip install 'grpo_nb[datasets]', or "
            "give a file that ends in .csv"
        ) from None
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
