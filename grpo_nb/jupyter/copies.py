"""This user's copies of the project's notebooks, in which runs and edits do not change the project.

A copy has the cells without outputs, and no pair, so that JupyterLab opens it after any edit. Its metadata keep a
digest of the copied cells, so that an unedited copy is renewed when the project's changes.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_nb import fingerprint
from grpo_nb.storage.files import RunError, clear_errors, write_atomically

ORIGINALS = fingerprint.ROOT.parent / "notebooks"
FOLDER = "lab"
"""Folder of the copies in the project's folder; git ignores it."""
MARK = "grpo_nb"
NEW, RENEWED, SAME, EDITED = "new", "renewed", "as it was", "yours, kept"
OLDER = "yours, kept; the project's has changed since: rename yours to get it"
LARGEST = 256 << 20


def make(folder: Path) -> Iterator[tuple[Path, str]]:
    """Copy each notebook of the project into `folder`, and say what became of it: NEW, RENEWED, SAME, EDITED or OLDER.

    Raises:
        RunError: this installation has no notebooks, the folder is theirs, or it cannot be written.
    """
    originals = sorted(ORIGINALS.glob("[0-9]*.ipynb"))
    if not originals:
        raise RunError(f"no notebooks in {ORIGINALS}: an installed package has none; clone the project's repository")
    if folder.resolve() == ORIGINALS.resolve():
        raise RunError(f"{folder} has the project's own notebooks; give another folder for your copies")
    with clear_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for original in originals:
        copy = folder / original.name
        yield copy, _copied(json.loads(original.read_bytes()), copy)


def _copied(book: dict[str, Any], copy: Path) -> str:
    now, standing = _digest(book), _standing(copy)
    if standing is not None:
        copied, has = standing
        if has == now:
            return SAME
        if has != copied:
            return EDITED if copied == now else OLDER
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    book["metadata"].pop("jupytext", None)
    book["metadata"][MARK] = {"copied": now}
    write_atomically(copy, (json.dumps(book, indent=1, ensure_ascii=False) + "\n").encode())
    return NEW if standing is None else RENEWED


def _standing(copy: Path) -> tuple[str, str] | None:
    """Digests of the cells that were copied and of those that a copy has now; None without a copy.

    For a notebook that is no copy, or that cannot be read, the first is empty: it belongs to the user.
    """
    try:
        if copy.exists() and not copy.is_file():  # opening a FIFO would wait for a writer
            return "", "unreadable"
        with open(copy, "rb") as file:
            book = json.loads(file.read(LARGEST))
        return str(book["metadata"].get(MARK, {}).get("copied", "")), _digest(book)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "", "unreadable"


def _digest(book: dict[str, Any]) -> str:
    """Digest of the cells' kinds and texts; outputs and metadata do not count."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]
