"""News for a study's driver: numbered, so that none is lost between two polls or while one is being answered."""

from __future__ import annotations

import asyncio

from scheduler.api.mailbox import Mailbox


def test_news_has_a_number_that_tells_whether_there_is_more() -> None:
    async def story() -> None:
        mailbox = Mailbox()
        before = mailbox.news("s")
        waiter = asyncio.ensure_future(before.more.wait())
        mailbox.notify("other")
        await asyncio.sleep(0)
        assert not waiter.done()
        mailbox.notify("s")
        assert await asyncio.wait_for(waiter, 5.0)
        assert mailbox.news("s").number == before.number + 1
        assert not mailbox.news("s").more.is_set()

    asyncio.run(story())


def test_who_waits_on_an_old_number_is_woken_at_once_however_late_it_waits() -> None:
    async def story() -> None:
        mailbox = Mailbox()
        before = mailbox.news("s")
        mailbox.notify("s")
        await asyncio.wait_for(before.more.wait(), 5.0)

    asyncio.run(story())
