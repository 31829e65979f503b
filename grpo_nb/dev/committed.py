"""Execute the notebooks and keep what they show in them: `python -m grpo_nb.dev.committed notebooks/[0-9]*.ipynb`.

A reader on a code host sees tables and pictures without running anything. The notebooks run in a scratch project; what
is kept needs no kernel: no widgets, no progress bars, no paths of the machine that ran them.
"""

import argparse
import base64
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError, DeadKernelError
from PIL import Image
from rich.console import Console

from grpo_nb import fingerprint
from grpo_nb.dev import render
from grpo_nb.plots import canvas

LARGEST = 500_000
"""Bytes of a notebook with its outputs."""
HERE = {str(fingerprint.ROOT.parent): ".", sys.prefix: ".venv"}
"""Folders of this machine, and what stands for them."""
LONGEST_TEXT = 1000
"""Characters of a table's text that stay in addition to the table itself."""
SHOWN = ("text/html", "text/markdown", "image/png", "text/plain")
"""Types of output that a code host can show."""


def execute(notebooks: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """Run the notebooks in order in a scratch project and write their outputs into them; each with its size in bytes.

    Raises:
        CellExecutionError, DeadKernelError: a cell failed, or the kernel died; the notebooks from there on stay.
        ValueError: a notebook would be larger than LARGEST.
    """
    with render.scratch_copies(notebooks) as copies:
        for path, copy in zip(notebooks, copies, strict=True):
            ran = nbformat.read(copy, as_version=4)  # type: ignore[no-untyped-call]
            render.execute(ran, copy.parent)
            scratch = str(copy.parent.parent)
            text = nbformat.writes(still(ran, {scratch: ".", **HERE})) + "\n"  # type: ignore[no-untyped-call]
            if (size := len(text.encode())) > LARGEST:
                raise ValueError(f"{path} would have {size} bytes, at most {LARGEST}: show fewer or smaller pictures")
            path.write_text(text, encoding="utf-8")
            yield path, size


def still(notebook: Any, places: Mapping[str, str]) -> Any:
    """The notebook, changed in place: outputs that need no kernel, with folders of `places` by their other names."""
    for name in ("widgets", "language_info"):
        notebook.metadata.pop(name, None)
    count = 0
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "tags"}
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = [kept for output in cell.outputs if (kept := _kept(output, places, count)) is not None]
    return notebook


def _kept(output: Any, places: Mapping[str, str], count: int) -> Any | None:
    """An output without what only a kernel can show; None where nothing is left."""
    if output.output_type == "stream":
        if output.name == "stderr":  # progress bars
            return None
        output.text = _renamed(output.text, places)
        return output
    if output.output_type == "error":
        return output
    live = render.WIDGET in output.data
    output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
    output.metadata = {}
    rich = {"text/html", "image/png"} & output.data.keys()
    if live and not rich:
        return None
    if rich and len(output.data.get("text/plain", "")) > LONGEST_TEXT:
        del output.data["text/plain"]
    for kind in ("text/html", "text/markdown", "text/plain"):
        if kind in output.data:
            output.data[kind] = _renamed(output.data[kind], places)
    if "image/png" in output.data:
        output.data["image/png"] = _in_few_colours(output.data["image/png"])
    if output.output_type == "execute_result":
        output.execution_count = count
    return output


def _renamed(text: str, places: Mapping[str, str]) -> str:
    for place in sorted(places, key=len, reverse=True):  # a folder inside another comes first
        text = text.replace(place, places[place])
    return text


def _in_few_colours(picture: str) -> str:
    """A PNG in Base64, as small as the pictures of saved notebooks."""
    found = io.BytesIO()
    canvas.in_few_colours(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")).save(
        found, "PNG", optimize=True
    )
    return base64.b64encode(found.getvalue()).decode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: all written; 1: a cell failed, or a notebook is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    console = Console(stderr=True)
    try:
        for path, size in execute(parser.parse_args(arguments).notebooks):
            console.print(f"{path}: {size / 1000:.0f} kB")
    except (CellExecutionError, DeadKernelError, ValueError) as error:
        console.print(str(error), markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
