"""Syntax trees of the package's files, each parsed and walked once in a process of tests."""

import ast
import functools
from pathlib import Path


@functools.cache  # when a test asks: collecting them in a process that runs other files parses nothing
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """The tree's nodes, itself among them."""
    return tuple(ast.walk(tree))
