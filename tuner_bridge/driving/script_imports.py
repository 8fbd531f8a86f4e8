"""Modules that a script, or the cells of a notebook, import at the top level.

Some are imported for what they do by that alone: a library's registry has a new entry then. Replicas, which do not run
these lines, import them too.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

_OWN_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def imports_of(main: types.ModuleType) -> list[str]:
    """Return the imported modules in the order of the script's lines."""
    names: dict[str, None] = {}
    for text in _texts_of(main):
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        for statement in body:
            names |= dict.fromkeys(_imported(statement, getattr(main, "__package__", None) or ""))
    return [name for name in names if name in sys.modules]


def _texts_of(main: types.ModuleType) -> Iterator[str | bytes]:
    file = getattr(main, "__file__", None)
    if file:
        try:
            yield Path(file).read_bytes()
        except OSError:
            return
    interactive: Any = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    if shell is not None:
        yield from map(shell.transform_cell, shell.user_ns.get("In", []))


def _imported(statement: ast.stmt, package: str) -> Iterator[str]:
    """Not what stands in functions and classes: it is imported where these run."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, _OWN_SCOPES):
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = (
                    resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
                )
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)
        waiting += ast.iter_child_nodes(node)
