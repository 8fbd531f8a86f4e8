"""Priorities of studies, those that yield to others taken into account."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from trials.errors import InvalidStudyTerms
from trials.record import Study

logger = logging.getLogger(__name__)


def effective_priorities(studies: Iterable[Study]) -> dict[str, int]:
    """Return priorities by study: its own, or one less than the lowest that it yields to, whichever is less.

    Names of studies that are not there (any more) are ignored. Raises InvalidStudyTerms when studies yield in a
    circle.
    """
    by_name = {study.name: study for study in studies}
    called = _by_what_they_are_called(by_name.values())
    before = {
        name: [other for named in study.terms.yields_to for other in called.get(named, ())]
        for name, study in by_name.items()
    }
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise InvalidStudyTerms(f"studies yield to each other in a circle: {circle}; remove one of these") from None
    found: dict[str, int] = {}
    for name in order:
        found[name] = min([by_name[name].terms.priority, *(found[other] - 1 for other in before[name])])
    return found


def priorities_of(studies: Mapping[str, Study]) -> dict[str, int]:
    """Return the effective priorities; each study's own where they contradict each other."""
    try:
        return effective_priorities(studies.values())
    except InvalidStudyTerms as error:
        logger.error("yields_to contradicts itself, each study keeps its own priority error=%s", error)
        return {name: study.terms.priority for name, study in studies.items()}


def unknown_names(study: Study, studies: Iterable[Study]) -> list[str]:
    """Whom it yields to and nobody is called; a study of that name may still come."""
    called = _by_what_they_are_called(studies)
    return [name for name in study.terms.yields_to if name not in called]


def _by_what_they_are_called(studies: Iterable[Study]) -> dict[str, list[str]]:
    """Names of studies: all of one title, and the one of a name that is nobody's title."""
    by_title: dict[str, list[str]] = {}
    names = []
    for study in studies:
        by_title.setdefault(study.called, []).append(study.name)
        names.append(study.name)
    return {name: [name] for name in names} | by_title
