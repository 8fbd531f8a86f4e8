"""Priorities of studies, those that yield to others taken into account."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from trials.errors import InvalidStudyTerms
from trials.terms import StudyTerms


def effective_priorities(terms: Mapping[str, StudyTerms]) -> dict[str, int]:
    """By study: its own priority, or one less than the lowest of those that it yields to, whichever is less.

    Studies that do not exist (any more) are ignored. Raises InvalidStudyTerms when studies yield in a circle.
    """
    before = {name: [other for other in its.yields_to if other in terms] for name, its in terms.items()}
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise InvalidStudyTerms(f"studies yield to each other in a circle: {circle}; take one of these out") from None
    found: dict[str, int] = {}
    for name in order:
        found[name] = min([terms[name].priority, *(found[other] - 1 for other in before[name])])
    return found
