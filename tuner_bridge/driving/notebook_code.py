"""What an objective that was written in a notebook needs, as a module that replicas can import.

Of the cells that were run, the statements that define what the function uses are kept, and what those use in turn:
imports, functions, classes and assignments at the top level, each name as it was defined last. They run again in each
replica, as the top level of a script does. Nothing is pickled.
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

_DEFINES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
)


def module_of(cells: Iterable[str], function: str) -> str:
    """The text of the module. Pure. Raises InvalidSweep for what the function uses and no such statement defines.

    ``cells``: those that were run, oldest first, without what only a notebook understands.
    """
    statements = [each for cell in cells for each in _statements(cell)]
    defined: dict[str, int] = {}
    for place, statement in enumerate(statements):
        for name in _bound_by(statement):
            defined[name] = place
    others = {name for statement in statements if not isinstance(statement, _DEFINES) for name in _stored_in(statement)}
    wanted, kept = [function], set[int]()
    while wanted:
        name = wanted.pop()
        if name not in defined:
            if name in others:
                raise InvalidSweep(
                    f"{function} uses {name!r}, which a loop, a condition or another compound statement of the "
                    "notebook sets; replicas run its imports, functions, classes and plain assignments again. Put what "
                    "makes it into a function"
                )
            continue
        place = defined[name]
        if place not in kept:
            kept.add(place)
            wanted += _used_by(statements[place])
    if function not in defined:
        raise InvalidSweep(f"no cell of the notebook that was run defines {function}; run its cell, and try again")
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


def _bound_by(statement: ast.stmt) -> list[str]:
    """Names that a definition gives a value."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).partition(".")[0] for each in statement.names]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return _stored_in(statement)
    return []


def _stored_in(statement: ast.stmt) -> list[str]:
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _used_by(statement: ast.stmt) -> Sequence[str]:
    """Names that it may look up, its own ones among them: one too many does no harm."""
    found = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return sorted(found - set(dir(builtins)))


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _has_future(statements: Sequence[ast.stmt]) -> bool:
    return any(map(_is_future, statements))
