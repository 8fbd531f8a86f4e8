"""What an objective that was written in a notebook needs, as a module that replicas can import.

Of the cells that were run, the statements that define what the function uses are kept, and what those use in turn:
imports, functions and classes as they were defined last, and all statements that set a name or change its value, in
order. They run again in each replica, as the top level of a script does. Nothing is pickled.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tuner_bridge.errors import InvalidSweep

_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_IMPORTS = ast.Import | ast.ImportFrom
_OWN_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def module_of(cells: Iterable[str], function: str) -> str:
    """The text of the module. Pure. Raises InvalidSweep for what the function uses and no such statement defines.

    ``cells``: those that were run, oldest first, without what only a notebook understands.
    """
    statements = [each for cell in cells for each in _statements(cell)]
    defines: dict[str, list[int]] = {}
    compound: set[str] = set()
    for place, statement in enumerate(statements):
        names = _sets(statement)
        if names is None:
            compound |= _stored_in(statement)
            continue
        for name in names:
            # A function that is defined anew has nothing of the one before; a value may be made of it.
            again = isinstance(statement, _NAMED | _IMPORTS)
            defines[name] = [place] if again else [*defines.get(name, ()), place]
    if function not in defines:
        raise InvalidSweep(f"no cell of the notebook that was run defines {function}; run its cell, and try again")
    wanted, kept, seen = [function], set[int](), set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in compound:
            raise InvalidSweep(
                f"{function} uses {name!r}, which a loop, a condition or another compound statement of the notebook "
                "sets; replicas run its imports, functions, classes and plain statements again. Put what makes it into "
                "a function"
            )
        for place in defines.get(name, ()):
            if place not in kept:
                kept.add(place)
                wanted += _used_by(statements[place])
    future = "from __future__ import annotations\n" if _has_future(statements) else ""
    body = [ast.unparse(statements[place]) for place in sorted(kept) if not _is_future(statements[place])]
    return "\n\n".join([f'"""Cells of a notebook that {function} needs."""\n{future}', *body]) + "\n"


def written(text: str, folder: Path) -> Path:
    """The module as a file of the working folder, for as long as this process lives."""
    path = folder / f"elastune_notebook_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not path.exists():
        path.write_text(text)
        atexit.register(_remove, path)
    return path


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _statements(cell: str) -> list[ast.stmt]:
    try:
        return ast.parse(cell).body
    except SyntaxError:
        # It did not run either.
        return []


def _sets(statement: ast.stmt) -> set[str] | None:
    """Names that a plain statement gives a value, or whose value it changes; None for a compound one."""
    if isinstance(statement, _NAMED):
        return {statement.name}
    if isinstance(statement, _IMPORTS):
        return {(each.asname or each.name).partition(".")[0] for each in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return _stored_in(statement)
    if isinstance(statement, ast.Expr):
        # A method may change what it is called on: settings.update(...), layers.append(...).
        called = statement.value.func if isinstance(statement.value, ast.Call) else None
        return {_root(called)} - {""} if isinstance(called, ast.Attribute) else set()
    if isinstance(statement, ast.Delete | ast.Pass | ast.Assert | ast.Raise):
        return set()
    return None


def _stored_in(statement: ast.stmt) -> set[str]:
    """Names of the top level that it sets, or the parts of which it sets; not those of scopes within it."""
    found: set[str] = set()
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _OWN_SCOPES):
            if isinstance(node, _NAMED):
                found.add(node.name)
            continue
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.add(_root(node))
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        waiting += ast.iter_child_nodes(node)
    return found - {""}


def _root(node: ast.AST) -> str:
    """The name at the beginning of ``a.b[c]``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _used_by(statement: ast.stmt) -> Sequence[str]:
    """Names that it may look up, its own ones among them: one too many does no harm."""
    found = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return sorted(found - set(dir(builtins)))


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _has_future(statements: Sequence[ast.stmt]) -> bool:
    return any(map(_is_future, statements))
