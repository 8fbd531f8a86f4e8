"""What people ask a study's driver for: trials with parameters of their own choice. The driver says whether it will.

Nothing is stored: who asks waits for the answer, and asks again where none came. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Wish:
    parameters: Mapping[str, Any]
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""


class Wishes:
    def __init__(self) -> None:
        self._open: dict[str, dict[str, _Wish]] = {}

    async def make(self, study: str, parameters: Mapping[str, Any], wait_seconds: float) -> str:
        """Have the study's driver run a trial with these parameters; returns why it will not, empty if it will.

        Raises TimeoutError when it does not answer.
        """
        name, wish = secrets.token_hex(8), _Wish(parameters)
        self._open.setdefault(study, {})[name] = wish
        try:
            await asyncio.wait_for(wish.answered.wait(), wait_seconds)
        finally:
            self._open[study].pop(name)
            if not self._open[study]:
                del self._open[study]
        return wish.refusal

    def open_ones(self, study: str) -> list[dict[str, Any]]:
        return [{"id": name, "parameters": dict(wish.parameters)} for name, wish in self._open.get(study, {}).items()]

    def answer(self, study: str, name: str, refusal: str) -> None:
        wish = self._open.get(study, {}).get(name)
        if wish is not None:
            wish.refusal = refusal
            wish.answered.set()
