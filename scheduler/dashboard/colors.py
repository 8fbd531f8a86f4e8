"""One colour a trial, the same in the terminal and in pictures; neighbours in number are far apart in hue."""

from __future__ import annotations

import colorsys

_GOLDEN_RATIO = 0.61803398875


def trial_color(number: int) -> str:
    """``#rrggbb`` for the trial of that number."""
    hue = (0.58 + number * _GOLDEN_RATIO) % 1.0
    lightness = (0.56, 0.46, 0.66)[number % 3]
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
