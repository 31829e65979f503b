"""What is kept of an executed notebook: outputs that a code host shows, and nothing of the machine."""

import base64
import io
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4
from PIL import Image, ImageColor

from grpo_nb.dev import committed, render
from grpo_nb.plots import canvas


def png(*colours: str) -> str:
    """A picture of stripes."""
    picture, file = Image.new("RGB", (len(colours), 1)), io.BytesIO()
    for place, colour in enumerate(colours):
        picture.putpixel((place, 0), ImageColor.getrgb(colour))
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


PNG = png(*canvas.PALETTE)


def notebook(*outputs: Any) -> Any:
    return v4.new_notebook(
        cells=[
            v4.new_code_cell(
                "1", outputs=list(outputs), metadata={"tags": ["t"], "execution": {"shell.execute_reply": "now"}}
            )
        ],
        metadata={
            "kernelspec": {"name": "python3", "display_name": "p"},
            "widgets": {},
            "language_info": {"name": "python"},
        },
    )


def shown(**data: Any) -> Any:
    return v4.new_output("display_data", data={key.replace("_", "/"): text for key, text in data.items()})


def kept(*outputs: Any) -> list[Any]:
    return list(committed.still(notebook(*outputs), {"/scratch/x": ".", "/scratch": "s"}).cells[0].outputs)


def test_a_widget_leaves_its_picture_or_nothing() -> None:
    picture, bare = shown(image_png=PNG, text_plain="Dashboard()"), shown(text_plain="Dashboard()")
    for output in (picture, bare):
        output.data[render.WIDGET] = {"model_id": "1"}
    (found,) = kept(picture, bare)
    assert set(found.data) == {"image/png", "text/plain"}
    left = Image.open(io.BytesIO(base64.b64decode(found.data["image/png"]))).convert("RGB")
    assert [left.getpixel((place, 0)) for place in range(left.width)] == [*map(ImageColor.getrgb, canvas.PALETTE)]


def test_a_long_table_is_kept_once() -> None:
    long, bare = "a" * 2000, shown(text_plain="a" * 2000)
    assert [set(output.data) for output in kept(shown(text_html="t", text_plain=long), bare)] == [
        {"text/html"},
        {"text/plain"},
    ]


def test_progress_bars_and_paths_of_the_machine_go() -> None:
    bar = v4.new_output("stream", name="stderr", text="10%")
    text = v4.new_output("stream", name="stdout", text="/scratch/x/runs/demo")
    found = kept(bar, text, shown(text_html="<b>/scratch/x/runs</b>"))
    assert [output.get("text") or output.data["text/html"] for output in found] == ["./runs/demo", "<b>./runs</b>"]


def test_metadata_of_the_run_goes_and_cells_are_numbered() -> None:
    book = committed.still(notebook(shown(text_plain="a")), {"/scratch/x": ".", "/scratch": "s"})
    assert set(book.metadata) == {"kernelspec"} and book.cells[0].metadata == {"tags": ["t"]}
    assert book.cells[0].execution_count == 1


def test_a_notebook_keeps_its_outputs_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "1_a.ipynb"
    path.write_text(nbformat.writes(notebook()))
    before = path.read_bytes()

    def run(ran: Any, folder: Path) -> None:
        assert folder != tmp_path
        ran.cells[0].outputs = [shown(text_plain="a" * 600)]

    monkeypatch.setattr(render, "execute", run)
    monkeypatch.setattr(committed, "LARGEST", 500)
    assert committed.main([str(path)]) == 1 and path.read_bytes() == before
    monkeypatch.setattr(committed, "LARGEST", 5000)
    assert committed.main([str(path)]) == 0
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].data["text/plain"] == "a" * 600
