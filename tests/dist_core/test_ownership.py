"""Who owns what in a replica, read from the syntax trees: the position, the generation, and what a part is handed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import dist_core
from dist_core.generations.generation import Generation
from dist_core.state.position import Position

ROOT = Path(dist_core.__file__).parents[1]
OWNERS = {"position": Position, "generation": Generation}
MOST_COLLABORATORS = 6
ROOMS = ("dist_core/trial", "dist_core/generations", "dist_core/training", "dist_core/larger")


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT), parsed(file)


def written(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes that something is assigned to."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in targets:
                each = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (one for one in each if isinstance(one, ast.Attribute))


def owner_of(target: ast.Attribute) -> str:
    """The last name before the attribute, without the underscore of a private one."""
    value = target.value
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return name.removeprefix("_")


@pytest.mark.parametrize("name", OWNERS)
def test_nobody_else_writes_it(name: str) -> None:
    """An adapter of a trainer says where it stands, and does not set it."""
    attributes = vars(OWNERS[name]()).keys()
    outside = [
        f"{file}:{target.lineno} {name}.{target.attr}"
        for file, tree in trees("dist_core", "trials", "scheduler", "tuner_bridge")
        for target in written(tree)
        if owner_of(target) == name and target.attr in attributes
    ]
    assert outside == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_part_of_a_replica_is_handed_more_than_six_others(room: str) -> None:
    large = []
    for file, tree in trees(room):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                given = node.args.args[1:]
                if len(given) > MOST_COLLABORATORS:
                    large.append(f"{file}:{node.lineno} {len(given)}")
    assert large == []


def test_the_test_sees_a_write() -> None:
    tree = ast.parse("core.position.epoch, core.other = 1, 2\nself._generation.joined |= True\nx: int = 1")
    assert [(owner_of(each), each.attr) for each in written(tree)] == [
        ("position", "epoch"),
        ("core", "other"),
        ("generation", "joined"),
    ]
