"""README's picture of a run, light and dark."""

from pathlib import Path

import numpy as np
from PIL import Image

from grpo_nb.dev import picture
from tests.support import made_rows
from tests.support.tiny import tiny_run


def test_the_dark_picture_keeps_hues_and_turns_white_into_the_page(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "seen")
    for row in made_rows.healthy(5):
        run.log_metrics(row)
    light, dark = (Image.open(path).convert("RGB") for path in picture.write(run, tmp_path))
    assert light.size == dark.size
    assert light.getpixel((0, 0)) == (255, 255, 255) and dark.getpixel((0, 0)) == (0x0D, 0x11, 0x17)
    blue = picture.dark(Image.new("RGB", (1, 1), "#0072B2")).getpixel((0, 0))
    assert isinstance(blue, tuple) and blue == tuple(sorted(blue)) and blue[2] == 255
    assert (np.asarray(dark).mean() < 80) and (np.asarray(light).mean() > 200)
