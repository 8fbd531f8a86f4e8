"""A workload of models of several sizes, which their slots can hold whole, sharded or as stages.

A model of twelve equal blocks and its Adam take 16 bytes a parameter. Stages take their part of a pass and wait for
each other (GPipe, section 2.3); shards gather weights over a link. What is true differs from that by up to a third for
each job and layout, as estimates from operations and bytes do.
"""

from __future__ import annotations

import random
from dataclasses import replace

from dist_core.goodput import BatchBounds, ThroughputParams
from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.layout import SHARDED, STAGES, WHOLE, Layout
from scheduler.simulator.application import ModelledApplication
from scheduler.simulator.workload import LayoutChoices, Submission

SLOT_BYTES = 16e9
BYTES_PER_PARAMETER = 16.0
SECONDS_PER_PARAMETER = 2.5e-11
"""Seconds for an example of a few hundred words, forwards and backwards."""
ACTIVATION_BYTES_PER_PARAMETER = 1.2
LINK_BYTES_PER_SECOND = 10e9
SIZES = (1, 2, 4)
MICROBATCHES_A_STAGE = 4
ERROR = 0.3
MODELS = ((2e8, 0.5), (1.2e9, 0.3), (2.6e9, 0.2))
"""Parameters, and the part of the jobs that have as many: for one slot, for two, for four."""


def mixed_sizes(jobs: int, *, seed: int = 0, mean_seconds_between: float = 240.0) -> list[Submission]:
    """Poisson arrivals; the same for the same seed."""
    chance, at, found = random.Random(seed), 0.0, []
    for number in range(jobs):
        at += chance.expovariate(1.0 / mean_seconds_between)
        [(parameters, _)] = chance.choices(MODELS, weights=[part for _, part in MODELS])
        parameters *= chance.uniform(0.8, 1.2)
        whole = _application(parameters, chance)
        choices = _choices(whole, parameters, chance)
        found.append(
            Submission(
                name=f"{whole.name}-{number}",
                at=at,
                application=whole,
                num_replicas=1,
                batch_size=whole.bounds.init_batch,
                choices=choices,
            )
        )
    return found


def fewest_slots(submission: Submission) -> Submission:
    """As a careful user fixes it: sharded over as few slots as its model has room on, recomputed where it must be."""
    choices = submission.choices
    assert choices is not None
    least = submission.application.bounds.min_atomic
    fitting = [each for each in choices.terms if each.layout.kind != STAGES and each.fits(SLOT_BYTES, least)]
    return _only(submission, min(fitting, key=lambda each: (each.layout.slots, each.layout.recomputes)).layout)


def most_slots(submission: Submission) -> Submission:
    """As a study fixes it whose largest model needs that many."""
    assert submission.choices is not None
    least = submission.application.bounds.min_atomic
    largest = [
        each for each in submission.choices.terms if (each.layout.slots, each.layout.kind) == (max(SIZES), SHARDED)
    ]
    return _only(submission, next(each.layout for each in largest if each.fits(SLOT_BYTES, least)))


def _only(submission: Submission, layout: Layout) -> Submission:
    assert submission.choices is not None
    return replace(submission, choices=submission.choices.only(str(layout)))


def _application(parameters: float, chance: random.Random) -> ModelledApplication:
    example = SECONDS_PER_PARAMETER * parameters
    reduced = 2.0 * 4.0 * parameters / LINK_BYTES_PER_SECOND / 10.0
    return ModelledApplication(
        name=f"model-{parameters / 1e9:.2g}b",
        bounds=BatchBounds(init_batch=32, max_batch=512, min_atomic=4, max_atomic=128),
        params=ThroughputParams(0.02, example, 2.0 * reduced, 0.05 * reduced, reduced, 0.02 * reduced, 2.0),
        epochs=60,
        steps_per_epoch=chance.uniform(100.0, 300.0) * (2e8 / parameters) ** 0.5,
        first_noise=4.0,
        last_noise=20.0,
    )


def _choices(whole: ModelledApplication, parameters: float, chance: random.Random) -> LayoutChoices:
    terms, applications = [], {}
    for slots in SIZES:
        for kind in (WHOLE,) if slots == 1 else (SHARDED, STAGES):
            for again in (False, True):
                each = _terms(Layout(slots, kind, again), parameters)
                truth = 1.0 if kind == WHOLE else chance.uniform(1.0 - ERROR, 1.0 + ERROR)
                relative = truth * each.seconds / (SECONDS_PER_PARAMETER * parameters)
                terms.append(each)
                if each.fits(SLOT_BYTES, whole.bounds.min_atomic):
                    bounds = each.bounds(whole.bounds, SLOT_BYTES)
                else:
                    bounds = whole.bounds
                slower = whole.params.slower(relative)
                # What replicas send each other is divided among a replica's slots.
                params = replace(whole.params, alpha_c=slower.alpha_c, beta_c=slower.beta_c) if slots > 1 else slower
                applications[str(each.layout)] = replace(whole, bounds=bounds, params=params)
    return LayoutChoices(terms=tuple(terms), applications=applications, slot_memory_bytes=SLOT_BYTES)


def _terms(layout: Layout, parameters: float) -> LayoutTerms:
    seconds = SECONDS_PER_PARAMETER * parameters
    fixed = BYTES_PER_PARAMETER * parameters
    activations = ACTIVATION_BYTES_PER_PARAMETER * parameters
    if layout.recomputes:
        seconds, activations = seconds * 4.0 / 3.0, activations / 8.0
    if layout.kind == SHARDED:
        gathered = 3.0 * 2.0 * parameters * (1.0 - 1.0 / layout.slots) / LINK_BYTES_PER_SECOND / 64.0
        return LayoutTerms(layout, 1.05 * max(seconds, gathered), fixed / layout.slots + parameters / 3.0, activations)
    if layout.kind == STAGES:
        count = MICROBATCHES_A_STAGE * layout.slots
        waits = 1.0 + (layout.slots - 1) / count
        # The first stage keeps the activations of as many microbatches as there are stages.
        return LayoutTerms(layout, seconds / layout.slots * waits, fixed / layout.slots, activations / count)
    return LayoutTerms(layout, seconds, fixed, activations)
