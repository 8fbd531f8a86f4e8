"""News for a study's driver: numbered, so that none is lost between two polls or while one is being answered."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from scheduler.api.mailbox import Mailbox
from scheduler.api.service import Announcements, Changes, Wish, Wishes
from tests.support.site import Site
from trials.record import ReplicaState
from trials.states import TrialState


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


# -------------------------------------------------------------------- trials that people want a study's driver to run


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


# -------------------------------------------------------- who waits for news of a trial is woken by that trial's news


def test_a_look_finds_the_trials_whose_replicas_have_something_to_hear(site: Site) -> None:
    changes = Changes(site.store)
    first, second = site.with_replica(0), site.with_replica(1)
    mine, other = (name.rpartition("-")[0] for name in (first, second))
    assert changes.look() == {mine, other}
    assert changes.look() == set()
    # What a replica measures and says is no news to the others.
    site.store.put_hints(mine, {"progress": 1.0})
    site.store.update_replica(first, contact_at=5.0)
    assert changes.look() == set()
    site.store.save_trial(replace(site.store.trial(mine), published=1, published_members=(first,)))
    assert changes.look() == {mine}
    site.store.update_replica(second, retry_join=True)
    assert changes.look() == {other}
    # It has heard and aimed, and is told to aim again, all since the last look: its row is as it was.
    site.store.update_replica(second, retry_join=False)
    site.store.update_replica(second, retry_join=True)
    assert changes.look() == {other}
    site.store.update_replica(second, retry_join=False)
    assert changes.look() == set()
    site.store.update_replica(second, state=ReplicaState.GONE)
    assert changes.look() == {other}
    site.store.save_trial(replace(site.store.trial(other), state=TrialState.CANCELLED))
    assert changes.look() == {other}
    assert changes.look() == set()


def test_only_those_who_wait_for_it_are_woken() -> None:
    async def wait() -> list[bool]:
        news = Announcements()
        mine, also_mine, other = news.of("a"), news.of("a"), news.of("b")
        news.tell(["a", "nobody waits for this one"])
        # Who looks again from here on waits for what comes next.
        return [mine.is_set(), also_mine.is_set(), other.is_set(), news.of("a").is_set()]

    assert asyncio.run(wait()) == [True, True, False, False]
