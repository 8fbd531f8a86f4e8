"""One colour a trial, the same in the terminal, in pictures and on the page; neighbours in number are far apart in hue.

Those of another study begin elsewhere on the wheel, and trials are named by their study where there are several.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping
from typing import Any

from trials.plain_words import told_apart

_GOLDEN_RATIO = 0.61803398875
_STUDY_TURN = 0.29


def trial_color(number: int, study: int = 0) -> str:
    """Return ``#rrggbb`` for a trial; ``study``: the place of its study among those that are shown."""
    hue = (0.58 + number * _GOLDEN_RATIO + study * _STUDY_TURN) % 1.0
    lightness = (0.56, 0.46, 0.66)[number % 3]
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


class Names:
    """Names and colours of the trials that are shown. ``trials``: as the API tells them."""

    def __init__(self, trials: Iterable[Mapping[str, Any]], studies: Iterable[Mapping[str, Any]] = ()) -> None:
        trials = list(trials)
        titles = told_apart({study["name"]: study.get("title") or study["name"] for study in studies})
        shown = {trial.get("study", "") for trial in trials}
        ordered = [*(name for name in titles if name in shown), *sorted(shown - titles.keys())]
        places = {name: place for place, name in enumerate(ordered)}
        several = len(ordered) > 1
        self._labels: dict[str, str] = {}
        self._colors: dict[str, str] = {}
        for trial in trials:
            study = trial.get("study", "")
            number = trial["number"]
            trial_id = trial.get("trial_id", str(number))
            self._labels[trial_id] = f"{titles.get(study, study)}/{number}" if several else str(number)
            self._colors[trial_id] = trial_color(number, places[study])

    def label(self, trial_id: str) -> str:
        return self._labels.get(trial_id, trial_id)

    def color(self, trial_id: str) -> str:
        return self._colors.get(trial_id, "#8a8f98")

    def within(self, sentence: str) -> str:
        """Return the sentence with names instead of ids: people know trials by their number."""
        for trial_id, label in self._labels.items():
            sentence = sentence.replace(trial_id, f"trial {label}")
        return sentence

    def __contains__(self, trial_id: str) -> bool:
        return trial_id in self._labels
