"""Errors in what a simulation is given; the message names file, value and rule."""

from __future__ import annotations


class InvalidWorkload(ValueError):
    """A workload or trace file cannot be used as it is."""
