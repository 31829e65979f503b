"""The pages of `make docs`: executed notebooks and the reference, by `python -m grpo_nb.dev.docs FOLDER NOTEBOOK ...`.

The notebooks run in a scratch project, so that their pages show a run from its beginning and touch nobody's runs.
A setting's meaning stands once, under its field in config/; a preset's in its docstring; a command's in its
help. These pages, `grpo-nb settings` and the tests read them there. Every page can be read without a network.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import nbformat

from grpo_nb import presets
from grpo_nb.cli.arguments import commands
from grpo_nb.config import Config
from grpo_nb.config.setting_keys import settings
from grpo_nb.dev import render
from grpo_nb.dev.docs_pages import index, parsed
from grpo_nb.doctor.known_errors import KNOWN
from grpo_nb.fault_lab import matrix
from grpo_nb.metrics import keys
from grpo_nb.metrics.healthy import HEALTHY

GUIDES = Path(__file__).parent / "pages"


def guides() -> dict[str, str]:
    """Markdown of the pages that are written by hand, by file name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(GUIDES.glob("*.md"))}


def pages() -> dict[str, str]:
    """Markdown of the reference, by file name."""
    return {
        "settings": _settings_page(),
        "metrics": _metrics_page(),
        "presets": _presets_page(),
        "commands": _commands_page(),
        "errors": _errors_page(),
        "faults": matrix.markdown(),
    }


def write(folder: Path, notebooks: Sequence[Path] = ()) -> list[Path]:
    """The guides, the reference pages and an index with a search, as HTML in `folder`; `notebooks` are in its list."""
    folder.mkdir(parents=True, exist_ok=True)
    written_by_hand, reference = ({n: parsed(text) for n, text in made.items()} for made in (guides(), pages()))
    found = written_by_hand | reference
    contents = [
        ("Guides", [(name, page.title) for name, page in written_by_hand.items()]),
        ("Notebooks, executed", [(path.stem, _title(path)) for path in notebooks]),
        ("Reference", [(name, page.title) for name, page in reference.items()]),
    ]
    search = [(name, *astuple(part)) for name, page in found.items() for part in (*page.sections, *page.rows)]
    texts = {name: page.body(contents, name) for name, page in found.items()} | {"index": index(contents, search)}
    written = []
    for name, text in texts.items():
        written.append(folder / f"{name}.html")
        written[-1].write_text(text, encoding="utf-8")
    return written


def execute(notebooks: Sequence[Path], folder: Path) -> int:
    """Run the notebooks in order in a scratch project, their pages in `folder`; `render.main`'s exit status."""
    with render.scratch_copies(notebooks) as copies:
        return render.main([*map(str, copies), "--out", str(folder)])


def _title(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells  # type: ignore[no-untyped-call]
    return str(cells[0].source.splitlines()[0].removeprefix("# "))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: all written; 1: a cell failed; 2: usage."""
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/docs"))
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks to execute (default: none)")
    options = parser.parse_args(arguments)
    for path in write(options.folder, options.notebooks):
        sys.stdout.write(f"{path}\n")
    return execute(options.notebooks, options.folder) if options.notebooks else 0


def _settings_page() -> str:
    cells = [(f"`{s.key}`", f"`{s.text}`", s.meaning) for s in settings(Config())]
    intro = "Defaults of `Config()`; a preset starts from its own numbers (`grpo-nb settings --preset NAME`)."
    return _page("Settings", intro, ("key", "default", "meaning"), cells)


def _metrics_page() -> str:
    cells = [
        (f"`{k.name}`", k.unit, k.meaning, HEALTHY.get(k.name, ""), ", ".join(k.producers)) for k in keys.TABLE.values()
    ]
    intro = "Keys of `metrics.jsonl` and `sft.jsonl`. A name in braces stands for each objective, label and so on."
    return _page("Metrics", intro, ("key", "unit", "meaning", "healthy, or what a change means", "computed in"), cells)


def _page(title: str, intro: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A page that is one table."""
    escaped = ([cell.replace("|", r"\|") for cell in row] for row in cells)
    rows = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *escaped)]
    return "\n".join([f"# {title}", "", intro, "", *rows])


def _presets_page() -> str:
    parts = ["# Presets"]
    for name, make in presets.PRESETS.items():
        first, _, rest = inspect.cleandoc(make.__doc__ or "").partition("\n")
        lines = [f"- {line}" if ":" in line.split(" ")[0] else line for line in rest.strip().splitlines()]
        parts += [f"## {name}", first, "\n".join(lines), make().geometry]
    return "\n\n".join(parts)


def _commands_page() -> str:
    parts = [f"## {name}\n\n```\n{command.format_help()}```" for name, command in commands().items()]
    return "\n\n".join(["# Commands", *parts])


def _errors_page() -> str:
    parts = [f"## {k.name}\n\n*Recognised by*: `{k.pattern}`\n\n{k.cause}\n\n**Change**: {k.change}." for k in KNOWN]
    intro = "The errors that `doctor.explain(error)` explains; a cell that fails with one shows the same text."
    return "\n\n".join(["# Errors", intro, *parts])


if __name__ == "__main__":
    sys.exit(main())
