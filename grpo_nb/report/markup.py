"""HTML, made at one place: templates into which every value is escaped.

What a run holds comes from data, models and strangers. Nothing else in the package writes markup; a value that is
markup already has come out of a template.
"""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup as Markup

from grpo_nb.printable import printable

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content-Security-Policy of the pages: pictures inside them, styles, and nothing else: no script, no request."""


def html(template: str, **values: object) -> Markup:
    """The template `<template>.html` with the values in it.

    A value that is no markup of another template is escaped, and its control characters are shown as escapes. `policy`
    is POLICY unless it is given.
    """
    return Markup(_template(template).render({"policy": POLICY} | values))


@cache
def _template(name: str) -> Template:
    return _environment().get_template(f"{name}.html")


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("grpo_nb.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _visible(value: object) -> object:
    return value if isinstance(value, Markup) else printable(value)
