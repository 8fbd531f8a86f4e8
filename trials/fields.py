"""Fields of what people ask for, each described once.

From a description come the check of a value, its JSON, and its place in the schema of a cluster's resource.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from itertools import pairwise
from typing import Any

from trials.checks import LONGEST_NAME, are_texts, is_integer
from trials.errors import InvalidTrialSpec


class Kind:
    """Kind of a field's value; JSON has most as they are."""

    def demand(self, value: Any) -> str | None:
        """Return what the value must be, in words that begin with a verb; None if it is that."""
        raise NotImplementedError

    def plain(self, value: Any) -> Any:
        """Return the value in the form that JSON has."""
        return value

    def parsed(self, value: Any) -> Any:
        """Convert from JSON; ``demand`` finds what is wrong with the value."""
        return value

    def schema(self) -> dict[str, Any]:
        """Return the field's schema as OpenAPI describes it."""
        raise NotImplementedError


class _Tuple(Kind):
    def plain(self, value: Any) -> Any:
        return list(value)

    def parsed(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    least: int
    most: int

    def demand(self, value: Any) -> str | None:
        fits = is_integer(value) and self.least <= value <= self.most
        return None if fits else f"be a whole number from {self.least} to {self.most}"

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    def demand(self, value: Any) -> str | None:
        return None if isinstance(value, bool) else "be true or false"

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Name(Kind):
    def demand(self, value: Any) -> str | None:
        fits = isinstance(value, str) and 1 <= len(value) <= LONGEST_NAME
        return None if fits else f"be a string of 1 to {LONGEST_NAME} characters"

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A field that holds a text.

    ``words``: what one that does not match the ``pattern`` must do, or be.
    """

    words: str = "be a string"
    pattern: str = ""

    def demand(self, value: Any) -> str | None:
        fits = isinstance(value, str) and (not self.pattern or re.fullmatch(self.pattern, value))
        return None if fits else self.words

    def schema(self) -> dict[str, Any]:
        return {"type": "string", **({"pattern": self.pattern} if self.pattern else {})}


@dataclass(frozen=True, slots=True)
class Texts(_Tuple):
    def demand(self, value: Any) -> str | None:
        return None if are_texts(value) else "be a list of strings"

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string"}}


@dataclass(frozen=True, slots=True)
class Integers(_Tuple):
    """Integers, ascending."""

    least: int
    most: int

    def demand(self, value: Any) -> str | None:
        fits = (
            isinstance(value, tuple)
            and all(is_integer(each) and self.least <= each <= self.most for each in value)
            and all(before < after for before, after in pairwise(value))
        )
        return None if fits else f"be whole numbers from {self.least} to {self.most}, each larger than the one before"

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "integer", "minimum": self.least, "maximum": self.most}}


@dataclass(frozen=True, slots=True)
class Values(Kind):
    """Names and any JSON."""

    def demand(self, value: Any) -> str | None:
        return None if isinstance(value, Mapping) else "be an object with names and values"

    def plain(self, value: Any) -> Any:
        return dict(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@dataclass(frozen=True, slots=True)
class Variables(Values):
    def demand(self, value: Any) -> str | None:
        fits = isinstance(value, Mapping) and all(isinstance(each, str) for pair in value.items() for each in pair)
        return None if fits else "be an object with strings for names and values"

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "string"}}


@dataclass(frozen=True, slots=True)
class Description:
    kind: Kind
    about: str
    key: str
    """Name of the field in a cluster's resource, where it is not its name in camel case."""
    called: str
    """Name in words; empty: its own."""


def described(
    kind: Kind,
    about: str = "",
    *,
    key: str = "",
    called: str = "",
    default: Any = MISSING,
    default_factory: Callable[[], Any] | Any = MISSING,
) -> Any:
    """Return a field of a dataclass; see ``Description``."""
    metadata = {"described": Description(kind, about, key, called)}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def descriptions(described_class: Any) -> Iterator[tuple[str, Description]]:
    """Yield all fields' descriptions by name."""
    for each in fields(described_class):
        yield each.name, each.metadata["described"]


def check(instance: Any) -> None:
    """Raise InvalidTrialSpec for the first value that is not what its description says."""
    for name, description in descriptions(instance):
        value = getattr(instance, name)
        demand = description.kind.demand(value)
        if demand is not None:
            raise InvalidTrialSpec(f"{description.called or name} is {value!r:.80}; it must {demand}")


def plain(instance: Any) -> dict[str, Any]:
    return {name: each.kind.plain(getattr(instance, name)) for name, each in descriptions(instance)}


def parsed(described_class: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the class; names that it does not have stay, and are refused by it."""
    kinds = {name: each.kind for name, each in descriptions(described_class)}
    return {name: kinds[name].parsed(value) if name in kinds else value for name, value in document.items()}


def schema(described_class: Any) -> dict[str, dict[str, Any]]:
    """Return the OpenAPI schema of each field."""
    return {
        name: {**each.kind.schema(), **({"description": each.about} if each.about else {})}
        for name, each in descriptions(described_class)
    }
