"""What studies go by among each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def told_apart(titles: Mapping[str, str]) -> dict[str, str]:
    """By study's name what it goes by among these: its title, or its own name where another one has that title."""
    shared = Counter(titles.values())
    return {name: title if shared[title] < 2 else name for name, title in titles.items()}
