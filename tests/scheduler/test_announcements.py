"""Who waits for news of a trial is woken by that trial's news."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from scheduler.api.service import Announcements, Changes
from tests.support.site import Site
from trials.record import ReplicaState
from trials.states import TrialState


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
