"""The dashboard of a run as README shows it, light and dark: `python -m grpo_nb.dev.picture runs/demo notebooks`."""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor

from grpo_nb import plots
from grpo_nb.plots import canvas
from grpo_nb.run.run import Run

DARK_PAPER = "#0D1117"
"""Background of a code host's dark pages."""


def write(run: Run, folder: Path) -> list[Path]:
    """Draw the run's dashboard into `dashboard.png` and `dashboard-dark.png` of `folder`; return both paths."""
    figure = plots.dashboard(run.metrics(), run.config, run.events(), name=run.name)
    drawn = Image.open(io.BytesIO(canvas.to_png(figure)))
    written = []
    for name, picture in {"dashboard.png": drawn.convert("RGB"), "dashboard-dark.png": dark(drawn)}.items():
        picture.quantize(256).save(folder / name, optimize=True)
        written.append(folder / name)
    return written


def dark(picture: Image.Image) -> Image.Image:
    """The picture for a dark page: white becomes `DARK_PAPER`, black white, and every hue stays.

    HSL with the lightness inverted: c + 1 - max - min for each of red, green and blue in [0, 1].
    """
    light = np.asarray(picture.convert("RGB"), dtype=np.float64) / 255
    inverted = light + 1 - light.max(-1, keepdims=True) - light.min(-1, keepdims=True)
    paper = np.array(ImageColor.getrgb(DARK_PAPER)) / 255
    return Image.fromarray(np.rint(255 * (paper + (1 - paper) * inverted)).astype(np.uint8))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both pictures of a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run that has trained")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    given = parser.parse_args(arguments)
    write(Run.open(given.run), given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
