"""Renders Markdown as pages of `make docs`: headings that can be linked to, a table of contents, and a search."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from grpo_nb.report.markup import POLICY, Markup, html

Contents = Sequence[tuple[str, Sequence[tuple[str, str]]]]
"""File name and title of each page, by group."""
SCRIPT = (Path(__file__).parent / "search.js").read_text(encoding="utf-8")
_LONGEST = 4000
"""Characters of a section that the search looks through."""


@dataclass(frozen=True)
class Section:
    """Section that the search finds, and a link leads to."""

    anchor: str
    heading: str
    text: str


@dataclass(frozen=True)
class Parsed:
    """A page of Markdown."""

    tokens: Sequence[Token]
    sections: Sequence[Section]
    """Sections by heading; the first is the page's title."""
    rows: Sequence[Section]
    """Rows of tables, by their first cell."""

    @property
    def title(self) -> str:
        return self.sections[0].heading

    def body(self, contents: Contents, name: str) -> str:
        """The page as HTML, with the list of all pages next to it."""
        markdown = _markdown()
        body = Markup(markdown.renderer.render(list(self.tokens), markdown.options, {}))
        return html("docs", title=self.title, body=body, contents=contents, here=name, headings=self.sections[1:])


def parsed(text: str) -> Parsed:
    """A page, its links to other Markdown pages turned into links to theirs in HTML."""
    tokens = _markdown().parse(text)
    sections: list[tuple[str, str, list[str]]] = []
    for token, following in pairwise([*tokens, Token("end", "", 0)]):
        if token.type == "heading_open":
            token.attrSet("id", slug(following.content))
            sections.append((slug(following.content), _plain(following), []))
        elif token.type in ("inline", "fence", "code_block") and sections:
            sections[-1][2].append(_plain(token))
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("href", re.sub(r"^([\w-]+)\.md(?=#|$)", r"\1.html", str(child.attrGet("href"))))
    found = [Section(anchor, heading, " ".join(parts)[:_LONGEST]) for anchor, heading, parts in sections]
    return Parsed(tokens, found, _rows(tokens))


def _rows(tokens: Sequence[Token]) -> list[Section]:
    """Rows of tables, each of which gets an anchor."""
    found: list[Section] = []
    row, cells = None, list[str]()
    for token in tokens:
        if token.type == "tr_open":
            row, cells = token, []
        elif token.type == "inline" and row is not None:
            cells.append(_plain(token))
        elif token.type == "tr_close" and row is not None:
            row.attrSet("id", slug(cells[0]))
            found.append(Section(slug(cells[0]), cells[0], " ".join(cells)))
            row = None
    return found


def index(contents: Contents, sections: Sequence[tuple[str, str, str, str]]) -> str:
    """The first page: all others, and a search through their sections (page, anchor, heading, text)."""
    found = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{found}'"
    data = json.dumps(sections).replace("<", "\\u003c")
    return html("docs_index", contents=contents, policy=policy, script=Markup(SCRIPT), data=Markup(data))


def slug(heading: str) -> str:
    """The anchor that code hosts give a heading.

    >>> slug("What the `doctor` says, and why")
    'what-the-doctor-says-and-why'
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _plain(token: Token) -> str:
    return " ".join(part.content for part in token.children or [token] if part.content)
