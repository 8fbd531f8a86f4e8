"""Check of what the pages say about the code: links, paths, names, options, and the blocks of code.

    python -m scripts.check_docs      all pages; exit status 1, and a line for each thing that is stale

Python blocks have to parse, what they import from our packages has to exist, and calls may only use keywords that it
takes. In shell blocks, our command's words and options and make's targets have to exist. YAML has to parse.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml

from dist_core.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dist_core", "trials", "scheduler", "tuner_bridge")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples", "docs", "deploy", "scripts", "requirements")
SHELL = ("", "sh", "bash", "console")
GENERATED = ("benchmarks/results", "docs/_build")

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_TEST = re.compile(r"::(\w+)")
_IMAGE = re.compile(r"elastune:(\d[\w.]*\d)")


@dataclass(frozen=True, slots=True, order=True)
class Stale:
    page: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.why}"


@dataclass(frozen=True, slots=True)
class Page:
    path: Path
    text: str

    @property
    def prose(self) -> str:
        """The page with its blocks of code blanked, every letter of the rest where it was."""
        return _FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), self.text)

    def stale(self, position: int, why: str) -> Stale:
        return Stale(str(self.path.relative_to(ROOT)), self.text.count("\n", 0, position) + 1, why)


def pages() -> list[Page]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return [Page(path, path.read_text()) for path in sorted(found)]


def check(page: Page) -> Iterator[Stale]:
    yield from _links(page)
    yield from _mentions(page)
    for image in _IMAGE.finditer(page.text):
        if image[1] != __version__:
            yield page.stale(image.start(), f"the version is {__version__}, not {image[1]}")
    for block in _FENCE.finditer(page.text):
        language, content = block[1], block[2]
        start = block.start(2)
        if language == "python":
            yield from (page.stale(start, why) for why in python_block(content))
        elif language in ("yaml", "yml"):
            try:
                list(yaml.safe_load_all(content))
            except yaml.YAMLError as error:
                yield page.stale(start, f"this is not YAML: {error}")
        elif language in SHELL:
            yield from (page.stale(start, why) for why in shell_block(content))


def _links(page: Page) -> Iterator[Stale]:
    prose = page.prose
    for link in _LINK.finditer(prose):
        target = link[1] or link[2]
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists():
            yield page.stale(link.start(), f"the link to {target} leads nowhere")
        elif anchor and path.suffix == ".md" and anchor not in _anchors(path):
            yield page.stale(link.start(), f"{name or page.path.name} has no heading #{anchor}")


@cache
def _anchors(path: Path) -> frozenset[str]:
    headings = re.findall(r"^#+ +(.+?) *$", Page(path, path.read_text()).prose, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def _mentions(page: Page) -> Iterator[Stale]:
    """Files and tests of ours that prose names."""
    for code in _CODE.finditer(page.prose):
        words = code[1]
        path = re.match(r"[\w./-]+", words)
        if path is not None and path[0].partition("/")[0] in FOLDERS and "/" in path[0]:
            name = path[0].rstrip("/.")
            known = name.startswith(GENERATED) or (ROOT / name).exists() or list(ROOT.glob(f"{name}.*"))
            if not known:
                yield page.stale(code.start(), f"there is no {name}")
        if "::" in words:
            for test in _TEST.findall(words):
                if test not in _tests():
                    yield page.stale(code.start(), f"there is no test {test}")


@cache
def _tests() -> frozenset[str]:
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names |= set(re.findall(r"^\s*(?:def|class) (\w+)", path.read_text(), re.MULTILINE))
    return frozenset(names)


def python_block(content: str) -> Iterator[str]:
    try:
        tree = ast.parse(content)
    except SyntaxError as error:
        yield f"this is not Python: {error.msg} in line {error.lineno} of the block"
        return
    ours: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            for alias in node.names:
                try:
                    ours[alias.asname or alias.name] = getattr(importlib.import_module(str(node.module)), alias.name)
                except (ImportError, AttributeError) as error:
                    yield f"{node.module} has no {alias.name}: {error}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES:
                    try:
                        importlib.import_module(alias.name)
                    except ImportError as error:
                        yield f"{alias.name} cannot be imported: {error}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            yield from _keywords(node, node.func.id, ours[node.func.id])


def _keywords(call: ast.Call, name: str, function: Any) -> Iterator[str]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name for parameter in parameters}
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            yield f"{name}() takes no {keyword.arg}="


def shell_block(content: str) -> Iterator[str]:
    for line in re.sub(r"\\\n", " ", content).splitlines():
        try:
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        except ValueError:
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if not words:
            continue
        command = words[0].rpartition("/")[2]
        if command == "elastune":
            yield from _our_command(words[1:])
        elif command == "make" and len(words) > 1:
            target = next((word for word in words[1:] if "=" not in word), "help")
            if target not in _make_targets():
                yield f"make has no target {target}"


def _our_command(words: list[str]) -> Iterator[str]:
    command = _command()
    said = "elastune"
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
            options = {each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)}
            if option not in options | {"--help"}:
                yield f"`{said}` has no option {option}"
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            if found is None:
                # A sentence that begins with our name is none of our commands.
                if said == "elastune" and not re.fullmatch(r"[a-z]+", word):
                    return
                yield f"`{said}` has no command {word}"
                return
            command = found
            said += f" {word}"


@cache
def _command() -> click.Command:
    from scheduler import cli

    return cli.command_line


@cache
def _make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def main() -> int:
    stale = sorted({each for page in pages() for each in check(page)})
    for each in stale:
        print(each, file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
