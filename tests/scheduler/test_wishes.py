"""Trials that people want a study's driver to run."""

from __future__ import annotations

import asyncio

from scheduler.api.service import Wish, Wishes


def test_a_wish_that_was_answered_is_told_to_the_driver_no_more() -> None:
    """Also before whoever made it has heard: it would be run twice."""

    async def ask() -> None:
        wishes = Wishes()
        making = asyncio.create_task(wishes.make("s", Wish({"lr": 0.1}, None, 0), 5.0))
        await asyncio.sleep(0)
        (told,) = wishes.open_ones("s")
        wishes.answer("s", told["id"], "")
        assert wishes.open_ones("s") == []
        assert await making == ""

    asyncio.run(ask())
