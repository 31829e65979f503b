"""Reference pages from the code itself: `python -m grpo_nb.docs FOLDER` writes settings, presets and commands.

A setting's meaning stands once, under its field in config/; a preset's in its docstring; a command's in its
help. These pages, `grpo-nb settings` and the tests read them there.
"""

import inspect
import sys
from pathlib import Path

from markdown_it import MarkdownIt

from grpo_nb import presets
from grpo_nb.cli.arguments import commands
from grpo_nb.cli.keys import settings
from grpo_nb.config import Config


def pages() -> dict[str, str]:
    """Markdown by file name."""
    return {"settings": _settings_page(), "presets": _presets_page(), "commands": _commands_page()}


def write(folder: Path) -> list[Path]:
    """The pages as HTML in `folder`; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    markdown, written = MarkdownIt("commonmark").enable("table"), []
    for name, text in pages().items():
        path = folder / f"{name}.html"
        path.write_text(_HTML.format(title=name, body=markdown.render(text)), encoding="utf-8")
        written.append(path)
    return written


def _settings_page() -> str:
    cells = [(f"`{s.key}`", f"`{s.text}`", s.meaning.replace("|", r"\|")) for s in settings(Config())]
    rows = ["| " + " | ".join(cell) + " |" for cell in cells]
    intro = "Defaults of `Config()`; a preset starts from its own numbers (`grpo-nb settings --preset NAME`).\n"
    return "\n".join(["# Settings", "", intro, "| key | default | meaning |", "| --- | --- | --- |", *rows])


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


_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>grpo_nb: {title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }}
code, pre {{ font-size: 14px; background: #f4f4f4 }} pre {{ padding: 1rem; overflow-x: auto }}
</style></head><body>
{body}
</body></html>
"""


if __name__ == "__main__":
    for page in write(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs")):
        sys.stdout.write(f"{page}\n")
