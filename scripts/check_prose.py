"""Check that pages and docstrings can be read by somebody who has never seen the project.

    python -m scripts.check_prose      all pages and modules; exit status 1, and a line for each finding

A page that is not reference has at most 200 lines, and a sentence of prose at most 45 words. A docstring stands by
itself in a hover box: it does not begin as a continuation of its name ("Of those that ...", "Whether ..."), nor, of a
function or class, with a parameter or an error ("``x``: ...", "Raises ...").
A variable that is used over more than three lines says what it is, not how the code came by it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.check_docs import PACKAGES, ROOT, Page, Stale, pages

LONGEST_PAGE = 200
LONGEST_SENTENCE = 45
REFERENCE = ("front_ends.md", "api.md", "command_line.md", "benchmarks.md", "policy_experiments.md")

VAGUE = ("found", "known", "given", "mine", "told")
MOST_LINES_OF_VAGUE = 3

_FRAGMENT = re.compile(r"(Of|What|Whether|How|By|So|Those|They|Who|Which|Where|That)\b")
_PARAMETER_OR_ERROR = re.compile(r"``\w+``[:,]|Raises\b")
_FRAGMENT_OF_FUNCTION = re.compile(r"(As|The same|None|It|Its|Nothing|This|Another|Within)\b")
_NOT_PROSE = re.compile(r"^\s*(\||#|!\[|<!--|    )|^\s*$", re.MULTILINE)


def _sentences(page: Page) -> Iterator[tuple[int, str]]:
    """Sentences of paragraphs and list items, with their positions; tables, headings and code have none."""
    position, start, block = 0, 0, ""
    for line in [*page.prose.splitlines(keepends=True), "\n"]:
        begins = re.match(r"\s*(?:[-*]|\d+\.|:) ", line) is not None
        if begins or _NOT_PROSE.match(line):
            yield from ((start, each) for each in re.split(r"(?<=[.!?:])\**\s+", block) if each.strip())
            start, block = position, ""
        if not _NOT_PROSE.match(line):
            block += line
        position += len(line)


def check_page(page: Page) -> Iterator[Stale]:
    length = page.text.count("\n")
    if length > LONGEST_PAGE and page.path.name not in REFERENCE:
        yield page.stale(0, f"the page has {length} lines; one that is not reference has at most {LONGEST_PAGE}")
    for position, sentence in _sentences(page):
        words = len(sentence.split())
        if words > LONGEST_SENTENCE:
            yield page.stale(position, f"a sentence has {words} words: {' '.join(sentence.split()[:8])} ...")


def check_names(path: Path, tree: ast.AST) -> Iterator[Stale]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines: dict[str, list[int]] = {}
        bound = set()
        for node in ast.walk(function):
            name = getattr(node, "id", None) or getattr(node, "arg", None)
            if name in VAGUE and isinstance(node, ast.Name | ast.arg):
                lines.setdefault(name, []).append(node.lineno)
                if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store):
                    bound.add(name)
        for name in sorted(bound):
            if max(lines[name]) - min(lines[name]) > MOST_LINES_OF_VAGUE:
                yield Stale(
                    str(path.relative_to(ROOT)), min(lines[name]), f"{name!r} does not say what the variable is"
                )


def check_docstrings(path: Path, tree: ast.AST) -> Iterator[Stale]:
    for node in ast.walk(tree):
        body: object = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                text = each.value.value
                if isinstance(text, str) and (begins := _begins_as_fragment(node, each, text.lstrip())):
                    why = f'the docstring begins with "{begins}" and cannot be read by itself'
                    yield Stale(str(path.relative_to(ROOT)), each.lineno, why)


def _begins_as_fragment(node: ast.AST, statement: ast.Expr, text: str) -> str | None:
    """Return the first word of a docstring that continues a name, or says what is beside the point."""
    begins = _FRAGMENT.match(text)
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__"
    # Texts further down in a class are those of its attributes.
    if begins is None and (is_function or (isinstance(node, ast.ClassDef) and node.body[0] is statement)):
        begins = _PARAMETER_OR_ERROR.match(text)
    if begins is None and is_function:
        begins = _FRAGMENT_OF_FUNCTION.match(text)
    return None if begins is None else begins[0]


def main() -> int:
    stale_places = [stale for page in pages() for stale in check_page(page)]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            stale_places += [*check_docstrings(path, tree), *check_names(path, tree)]
    for stale in sorted(stale_places):
        print(stale)
    return 1 if stale_places else 0


if __name__ == "__main__":
    sys.exit(main())
