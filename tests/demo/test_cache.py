"""The life of a prompt in the cache, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_otel.demo.books import recount
from kvcache_otel.demo.events import BlockStored

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.demo.cache import Admitted, Request, TieredCache

PAGE = 4


def prompt(*pages: int) -> list[int]:
    """Returns a prompt of pages that are known by a number, and one token more."""
    return [number * PAGE + at for number in pages for at in range(PAGE)] + [0]


def admit(cache: TieredCache, tokens: list[int]) -> tuple[Request, Admitted]:
    request = cache.submit(tokens)
    while not request.is_ready:
        cache.poll()
    admitted = cache.admit(request)
    assert admitted is not None
    return request, admitted


def serve(cache: TieredCache, tokens: list[int]) -> dict[str, int]:
    """Has a prompt served, and returns by what."""
    request, admitted = admit(cache, tokens)
    assert admitted.prompt == len(tokens)
    cache.finish(request)
    while cache.storage.going:
        cache.poll()
    return admitted.served


def test_a_prompt_is_served_by_the_tiers_that_have_it(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(prefetch_tokens=PAGE)
    assert serve(cache, prompt(1, 2)) == {"device": 0, "host": 0, "disk": 0}
    assert serve(cache, prompt(1, 2)) == {"device": 8, "host": 0, "disk": 0}
    assert serve(cache, prompt(1, 3)) == {"device": 4, "host": 0, "disk": 0}
    assert cache.controller.evict_device(99) == 3
    assert cache.controller.evict_host(1) == 1  # Page 2, which has not been used for longest.
    assert recount(cache).held == {"device": 0, "host": 2, "disk": 3}
    assert serve(cache, prompt(1, 2)) == {"device": 0, "host": 4, "disk": 4}
    assert recount(cache).held == {"device": 2, "host": 3, "disk": 3}
    assert serve(cache, prompt(1, 2)[:8]) == {"device": 4, "host": 0, "disk": 0}  # The last token is computed anyhow.
    assert cache.books["pages verified"] == 1 + 2  # From the disk; to the device.
    assert cache.books.total("pages lost") == 0


def test_what_somebody_else_has_computed_meanwhile_is_not_taken_from_the_disk(
    make_cache: Callable[..., TieredCache],
) -> None:
    cache = make_cache(prefetch_tokens=PAGE)
    serve(cache, prompt(1, 2, 3))
    cache.controller.evict_device(99)
    cache.controller.evict_host(99)
    waiting = cache.submit(prompt(1, 2, 3))
    other = cache.submit(prompt(1, 2))
    cache.admit(other)  # As a scheduler would that does not wait.
    cache.finish(other)
    while not waiting.is_ready or not other.is_ready:
        cache.poll()
    admitted = cache.admit(waiting)
    assert admitted is not None
    assert admitted.served == {"device": 8, "host": 0, "disk": 4}
    assert cache.books["pages unfulfilled", "device_covered"] == 2 + 2
    assert cache.books["pages fulfilled"] == 1
    recount(cache)


def test_a_retracted_request_has_its_own_pages_back(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(disk_tokens=0)
    request, _ = admit(cache, prompt(1, 2))
    assert cache.extend(request, [5, 6, 7, 8])
    before = list(request.pages)
    assert cache.retract(request)
    held = recount(cache)
    assert (held.owned["host"], held.owned["device"], len(request.parked or ())) == (2, 0, 2)
    cache.controller.evict_device(99)
    cache.controller.evict_host(99)  # Then what it shared is gone, and is computed anew.
    assert recount(cache).held == {"device": 0, "host": 0, "disk": 0}
    assert cache.restore(request)
    assert request.pages == before
    assert request.parked is None
    assert recount(cache).owned == {"device": 1, "host": 0, "disk": 0}
    assert cache.books["tokens prompted"] == 9


def test_what_is_lost_of_a_retracted_request_is_what_nobody_else_has(make_cache: Callable[..., TieredCache]) -> None:
    for finished, lost in ((False, 2), (True, 1)):
        cache = make_cache(disk_tokens=0, host_tokens=PAGE, policy="write_back")
        twins = [admit(cache, prompt(1, 2))[0] for _ in range(2)]
        for twin in twins:
            assert cache.extend(twin, [5, 6, 7, 8])
        if finished:
            cache.finish(twins[0])  # Its third page is in the tree now.
        assert not cache.retract(twins[1])
        assert cache.books["pages lost", "device", "host_pressure"] == lost
        assert cache.restore(twins[1])
        recount(cache)


def test_under_write_back_the_host_has_what_the_device_had(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(policy="write_back", disk_tokens=0)
    serve(cache, prompt(1, 2))
    assert recount(cache).held == {"device": 2, "host": 0, "disk": 0}
    cache.controller.evict_device(1)
    assert recount(cache).held == {"device": 0, "host": 2, "disk": 0}
    assert cache.books.total("pages lost") == 0
    cache.controller.evict_host(1)
    assert cache.books["pages lost", "host", "pool_full"] == 2


def test_write_through_may_wait_for_a_prefix_to_be_used(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(backup_after=2, disk_tokens=0)
    serve(cache, prompt(1, 2))
    assert recount(cache).held["host"] == 0
    serve(cache, prompt(1, 3))
    assert recount(cache).held["host"] == 1
    cache.controller.evict_device(99)
    assert cache.books["pages lost", "device", "write_through_unbacked_eviction"] == 2


def test_every_sink_is_given_the_events_once(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(disk_tokens=0)
    heard: list[object] = []
    cache.sinks += [heard.append, heard.append]
    serve(cache, prompt(1))
    events = cache.publish()
    assert [(type(event), event.medium) for event in events] == [(BlockStored, "GPU"), (BlockStored, "CPU_PINNED")]
    assert heard == [events, events]
    assert cache.publish() == []
    assert len(heard) == 2
