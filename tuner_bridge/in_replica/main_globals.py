"""What a script assigned after its top level ran, and its objective reads: replicas do not run those lines.

A replica imports the script, so what stands under ``if __name__ == "__main__":``, and what functions called from there
assign by ``global``, is unknown to it. Such a name is found by reading the source, and its value travels with the
objective; a value that cannot is refused with its name.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner_bridge.errors import InvalidSweep, InvalidValue
from tuner_bridge.in_replica.wire import decode_value, encode_value

_BAGS: dict[str, type] = {"Namespace": argparse.Namespace, "SimpleNamespace": types.SimpleNamespace}
"""Objects that are nothing but their attributes."""


def given_under_main(path: Path, function: types.FunctionType) -> dict[str, Any]:
    """By name, encoded: what ``function``'s script assigned in lines that replicas do not run, and the function reads.

    Raises InvalidSweep for a value that cannot travel.
    """
    try:
        assigned = set(_assigned_late(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return {}
    scope = function.__globals__
    return {
        name: _encoded(name, scope[name], function.__name__)
        for name in sorted(assigned & _names_read_by(function))
        if name in scope
    }


def put_into(scope: dict[str, Any], given: Mapping[str, Any]) -> None:
    """In a replica: the names get the values that they have in the script that was started."""
    scope.update({name: _decoded(value) for name, value in given.items()})


def _assigned_late(tree: ast.Module) -> Iterator[str]:
    for top in tree.body:
        if isinstance(top, ast.If) and _asks_for_main(top.test):
            for statement in top.body:
                yield from _assigned_by(statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def _asks_for_main(test: ast.expr) -> bool:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    texts = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
    return "__name__" in names and "__main__" in texts


def _assigned_by(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement binds or changes, not looking into the functions and classes it defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield (alias.asname or alias.name).partition(".")[0]
        return
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield from _assigned_by(node)
        else:
            yield from _targets(node)


def _targets(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, (ast.Subscript, ast.Attribute)) and isinstance(inner.ctx, ast.Store):
            # CONFIG["width"] = 3 changes CONFIG.
            base: ast.AST = inner
            while isinstance(base, (ast.Subscript, ast.Attribute)):
                base = base.value
            if isinstance(base, ast.Name):
                yield base.id


def _names_read_by(function: types.FunctionType) -> set[str]:
    """Global names in a function's code, and in that of the functions and classes of its module it leads to."""
    found: set[str] = set()
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            waiting += [value for value in vars(each).values() if isinstance(value, (types.FunctionType, type))]
            continue
        scope = each.__globals__
        if scope is not function.__globals__:
            continue
        for name in _names_in(each.__code__):
            found.add(name)
            value = scope.get(name)
            if isinstance(value, (types.FunctionType, type)) and value.__module__ == each.__module__:
                waiting.append(value)
    return found


def _names_in(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names, *(name for each in inner for name in _names_in(each))}


def _encoded(name: str, value: Any, function: str) -> Any:
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    try:
        for kind, bag in _BAGS.items():
            if type(value) is bag:
                return {"bag": [kind, encode_value({key: _plain(item) for key, item in vars(value).items()})]}
        return {"value": encode_value(_plain(value))}
    except InvalidValue:
        raise InvalidSweep(
            f"the objective {function} reads {name}, a {type(value).__name__} that the script makes under "
            'if __name__ == "__main__": or in a function that it calls from there. Replicas import the script and do '
            f"not run those lines. Assign {name} at the top level, or make it inside the objective"
        ) from None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, pathlib.PurePath) else value


def _decoded(document: Mapping[str, Any]) -> Any:
    if "module" in document:
        return __import__(document["module"], fromlist=["_"])
    if "bag" in document:
        kind, content = document["bag"]
        return _BAGS[kind](**decode_value(content))
    return decode_value(document["value"])
