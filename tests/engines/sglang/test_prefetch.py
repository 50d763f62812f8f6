"""What becomes of what storage had: each of SGLang's reasons, by the flow of the cache that leads to it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

import sglang  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.expected import (  # noqa: E402
    STORAGE,
    UNCOUNTED,
    assert_closes,
    assert_equals_recount,
    assert_equals_sglang,
    assert_prefetches_equal,
    by_reason,
)
from tests.engines.sglang.oracle import pools, unsettled  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engines.sglang.conftest import Instrumented

    Make = Callable[..., CacheDriver]

pytestmark = pytest.mark.engine

A = list(range(1000, 1000 + 4 * PAGE))
HEAD = A[: 2 * PAGE]
PROMPT = [*A, 1]

CACHE: dict[str, Any] = {}
BUFFER = {"host_memory_mode": "buffer_only", "host_ratio": 4.0}
"""The host as a tier, and as but a buffer."""


@pytest.fixture(params=[CACHE, BUFFER], ids=["cache", "buffer"])
def host(request: pytest.FixtureRequest) -> Any:
    """What the host is."""
    return request.param


@pytest.fixture(params=[True, False], ids=["metrics", "no-metrics"])
def books(request: pytest.FixtureRequest, make: Make, core: str, instrumented: Instrumented, tmp_path: Path) -> Make:
    """Makes drivers with a storage, whose books are compared with SGLang's after every step.

    Without its metrics SGLang keeps none. Ours must close all the same, and come to the same end.
    """

    def checked(**options: Any) -> CacheDriver:
        driver = make(core=core, storage_dir=tmp_path, metrics=request.param, **options)
        step = driver.step

        def step_and_compare() -> list[Any]:
            events = step()
            _compare(driver, instrumented)
            return events

        driver.step = step_and_compare  # type: ignore[method-assign]
        return driver

    return checked


def _compare(driver: CacheDriver, instrumented: Instrumented) -> None:
    rows = instrumented.rows
    assert_closes(rows)
    if driver.cache.enable_storage_metrics:
        assert_prefetches_equal(rows, driver)
        assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == unsettled(driver)


def _assert_became(
    driver: CacheDriver, instrumented: Instrumented, unfulfilled: dict[str, int], *, fulfilled: int = 0
) -> None:
    """Nothing is in flight or outstanding any more, and all hits have become this."""
    _compare(driver, instrumented)
    driver.settle()
    rows = instrumented.rows
    assert by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == unfulfilled
    assert rows.value(semconv.PREFETCH_FULFILLED_TOKENS, **STORAGE) == fulfilled
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == 0
    assert rows.value(semconv.PREFETCH_HIT_TOKENS, **STORAGE) == fulfilled + sum(unfulfilled.values())
    if driver.cache.enable_storage_metrics:
        assert_equals_sglang(rows, driver, timing="wall_clock")
    assert_equals_recount(rows, driver)


# -- how a test gets where it wants to be


def _store(driver: CacheDriver, *prompts: list[int]) -> None:
    """Has the storage alone keep these."""
    for prompt in prompts:
        driver.insert(prompt)
        driver.settle()
    driver.evict(1000)
    driver.settle()
    driver.evict_host(1000)
    driver.settle()


def _until(condition: Callable[[], object]) -> None:
    """Waits for SGLang's threads, without a step."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "a thread of SGLang's does not get there"
        time.sleep(0.0005)


def _answer(driver: CacheDriver) -> Any:
    """Waits for the storage's answer to the one question there is, of which the cache hears in its next step."""
    answers = driver.cache.cache_controller.prefetch_hit_queue
    _until(answers.qsize)
    return answers.queue[0]


def _step_until_outstanding(driver: CacheDriver, instrumented: Instrumented) -> None:
    """Steps until the cache has heard what storage has."""
    _answer(driver)
    driver.step()
    assert instrumented.rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE)


@contextmanager
def _slow_reads(driver: CacheDriver) -> Iterator[None]:
    """Within this, whoever reads from the storage waits."""
    backend = driver.cache.cache_controller.storage_backend
    get, go_on = backend.batch_get, threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        go_on.wait(30)
        return get(*args, **kwargs)

    backend.batch_get = slow
    try:
        yield
    finally:
        go_on.set()
        backend.batch_get = get


@contextmanager
def _full(pool: Any, tokens: int) -> Iterator[None]:
    """Within this, others have all of a pool but so many tokens."""
    hold = pool.alloc(pool.available_size() - tokens)
    try:
        yield
    finally:
        pool.free(hold)


# -- the reasons


def test_all_of_it_is_used(books: Make, instrumented: Instrumented, host: dict[str, Any]) -> None:
    driver = books(**host)
    _store(driver, A)
    driver.prefetch(PROMPT, "request")
    _assert_became(driver, instrumented, {}, fulfilled=len(A))


def test_below_threshold(books: Make, instrumented: Instrumented, host: dict[str, Any]) -> None:
    """Storage has less than is worth a read."""
    driver = books(prefetch_threshold=3 * PAGE, **host)
    _store(driver, HEAD)
    driver.prefetch(PROMPT, "request")
    _assert_became(driver, instrumented, {"below_threshold": len(HEAD)})


@pytest.mark.parametrize("left", [0, 2])
def test_storage_transfer(
    books: Make, instrumented: Instrumented, host: dict[str, Any], left: int, tmp_path: Path
) -> None:
    """Pages are gone from the storage by the time they are read."""
    driver = books(**host)
    _store(driver, A)
    request = driver.begin_prefetch(PROMPT, "request")
    for page in _answer(driver).hash_value[left:]:
        (file,) = tmp_path.glob(f"*{page}*.bin")
        file.unlink()
    driver.wait_for_prefetch(request)
    driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"storage_transfer": len(A) - left * PAGE}, fulfilled=left * PAGE)


def test_deadline(books: Make, instrumented: Instrumented, host: dict[str, Any]) -> None:
    """The storage reads for longer than a request may wait."""
    driver = books(prefetch_policy="timeout", **host)
    driver.cache.prefetch_timeout_base = driver.cache.prefetch_timeout_per_page = 0
    _store(driver, A)
    with _slow_reads(driver):
        request = driver.begin_prefetch(PROMPT, "request")
        _step_until_outstanding(driver, instrumented)
        driver.wait_for_prefetch(request)
        driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"deadline": len(A)})


def test_deadline_without_a_read(books: Make, instrumented: Instrumented) -> None:
    """A request may not wait any longer, and its hit still waits for room in the buffer."""
    driver = books(prefetch_policy="timeout", **BUFFER)
    driver.cache.prefetch_timeout_base = driver.cache.prefetch_timeout_per_page = 0
    _store(driver, A)
    with _full(driver.cache.host_pool_group, PAGE):
        request = driver.begin_prefetch(PROMPT, "request")
        _step_until_outstanding(driver, instrumented)
        driver.wait_for_prefetch(request)
    driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"deadline": len(A)})


@pytest.mark.parametrize("room", [0, 2])
def test_host_capacity(books: Make, instrumented: Instrumented, room: int) -> None:
    """The host has room for a part of it, or for less than is worth a read."""
    driver = books()
    _store(driver, A)
    with _full(driver.cache.host_pool_group, room * PAGE):
        request = driver.begin_prefetch(PROMPT, "request")
        driver.wait_for_prefetch(request)
        driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"host_capacity": len(A) - room * PAGE}, fulfilled=room * PAGE)


def test_device_capacity_where_the_host_is_a_tier(books: Make, instrumented: Instrumented) -> None:
    """What has come to the host stays there: it is less than SGLang cares to load back."""
    driver = books()
    driver.cache.load_back_threshold = 10
    _store(driver, HEAD)
    driver.prefetch([*HEAD, 1], "request")
    _assert_became(driver, instrumented, {"device_capacity": len(HEAD)})


def test_device_capacity_where_the_host_is_a_buffer(books: Make, instrumented: Instrumented) -> None:
    """The device has no room, as often as SGLang tries."""
    driver = books(**BUFFER)
    driver.cache.buffer_pipeline.max_staged_admission_defers = 1
    _store(driver, A)
    request = driver.begin_prefetch(PROMPT, "request")
    driver.wait_for_prefetch(request)
    with _full(driver.allocator, 0):
        driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"device_capacity": len(A)})


def test_cache_admission_shortfall(books: Make, instrumented: Instrumented) -> None:
    """The host has given up a part of what had come by the time the request is admitted."""
    driver = books()
    _store(driver, HEAD, A)
    first, second = (driver.begin_prefetch(prompt, name) for prompt, name in (([*HEAD, 1], "a"), (PROMPT, "b")))
    driver.wait_for_prefetch(first)
    driver.wait_for_prefetch(second)
    driver.end_prefetch(first)
    driver.settle()
    driver.evict_host(2 * PAGE)
    driver.end_prefetch(second)
    _assert_became(driver, instrumented, {"cache_admission_shortfall": len(A) - len(HEAD)}, fulfilled=2 * len(HEAD))


def test_anchor_lost(books: Make, instrumented: Instrumented) -> None:
    """What the request had on the device is gone when the storage answers. It asks again, for all of it."""
    driver = books(**BUFFER)
    _store(driver, A)
    driver.insert(HEAD)
    driver.settle()
    request = driver.begin_prefetch(PROMPT, "request")
    driver.evict(1000)
    driver.wait_for_prefetch(request)
    lost = {"anchor_lost": len(A) - len(HEAD)}
    assert by_reason(instrumented.rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == lost
    driver.prefetch(PROMPT, "request")
    _assert_became(driver, instrumented, lost, fulfilled=len(A))


def test_shrunk(books: Make, instrumented: Instrumented) -> None:
    """What the request had on the device is gone when it is admitted."""
    driver = books(**BUFFER)
    _store(driver, A)
    driver.insert(HEAD)
    driver.settle()
    driver.cache.buffer_pipeline.anchor_lock_cap_tokens = 0  # As of a device with room for one longest prompt.
    request = driver.begin_prefetch(PROMPT, "request")
    driver.wait_for_prefetch(request)
    driver.evict(1000)
    driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"shrunk": len(A) - len(HEAD)})


@pytest.mark.parametrize("covered", [2, 4])
@pytest.mark.parametrize("when", ["asked", "read"])
def test_device_covered(books: Make, instrumented: Instrumented, when: str, covered: int) -> None:
    """Another request computes the same, or a part, before the storage has answered or when it has been read."""
    driver = books(**BUFFER)
    _store(driver, A)
    request = driver.begin_prefetch(PROMPT, "request")
    if when == "read":
        driver.wait_for_prefetch(request)
    driver.insert(A[: covered * PAGE])
    driver.wait_for_prefetch(request)
    driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"device_covered": covered * PAGE}, fulfilled=len(A) - covered * PAGE)


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_another_has_computed_the_same_where_the_host_is_a_tier(
    books: Make, instrumented: Instrumented, write_policy: str
) -> None:
    """SGLang has no reason for that: the tokens are a usable prefix, whoever brought them."""
    driver = books(write_policy="write_back" if write_policy == "write_back" else "write_through")
    _store(driver, A)
    if write_policy == "write_through_selective":  # From now on what is used once stays on the device.
        driver.cache.write_through_threshold = 2
    with _slow_reads(driver):
        request = driver.begin_prefetch(PROMPT, "request")
        _step_until_outstanding(driver, instrumented)
        driver.insert(A)
        for _ in range(3):
            driver.step()
    driver.wait_for_prefetch(request)
    driver.end_prefetch(request)
    _assert_became(driver, instrumented, {}, fulfilled=len(A))


def test_dropped_as_too_long(books: Make, instrumented: Instrumented) -> None:
    """It would not fit into the buffer if that were empty."""
    driver = books(**{**BUFFER, "host_ratio": 0.125})
    room = pools(driver).host["kv"].total
    prompt = list(range(room + PAGE))
    _store(driver, *(prompt[: end * PAGE] for end in range(1, len(prompt) // PAGE + 1)))
    driver.prefetch([*prompt, 1], "request")
    _assert_became(driver, instrumented, {"dropped": len(prompt)})


def test_dropped_in_the_queue(books: Make, instrumented: Instrumented) -> None:
    """The request does not wait for the storage, whose hit still waits for room in the buffer."""
    driver = books(prefetch_policy="best_effort", **BUFFER)
    _store(driver, A)
    with _full(driver.cache.host_pool_group, PAGE):
        request = driver.begin_prefetch(PROMPT, "request")
        _step_until_outstanding(driver, instrumented)
        assert driver.is_prefetched(request)
    driver.end_prefetch(request)
    _assert_became(driver, instrumented, {"dropped": len(A)})


@pytest.mark.parametrize("when", ["reading", "read"])
def test_aborted(books: Make, instrumented: Instrumented, host: dict[str, Any], when: str) -> None:
    """SGLang leaves these out of its count."""
    driver = books(**host)
    _store(driver, A)
    request = driver.begin_prefetch(PROMPT, "request")
    if when == "read":
        driver.wait_for_prefetch(request)
        driver.abort(request)
    else:
        with _slow_reads(driver):
            _step_until_outstanding(driver, instrumented)
            driver.abort(request)
    _assert_became(driver, instrumented, {UNCOUNTED: len(A)})


def test_asked_again_before_it_was_admitted(books: Make, instrumented: Instrumented) -> None:
    """What was fetched, and the prefix that it continues, are lost in the queue. SGLang forgets the first hit then."""
    driver = books()
    _store(driver, A)
    driver.insert(HEAD)
    driver.settle()
    driver.wait_for_prefetch(driver.begin_prefetch(PROMPT, "request"))
    driver.evict(1000)
    driver.evict_host(1000)
    driver.prefetch(PROMPT, "request")
    _assert_became(driver, instrumented, {UNCOUNTED: len(A) - len(HEAD)}, fulfilled=len(A))


# -- reasons that no flow leads to


def test_unservable_prefix(books: Make, instrumented: Instrumented) -> None:
    """The device has the request's prefix, and cannot read it.

    SGLang's `try_lock_anchor` has that answer in its docstring, and its caller a branch for it, but no code of SGLang's
    gives it. It is for pipelines of other layouts, and SGLang has none. The answer is made up here, and nothing else.
    """
    driver = books(**BUFFER)
    _store(driver, A)
    driver.cache.buffer_pipeline.try_lock_anchor = lambda *_: ("unservable", 0)
    driver.prefetch(PROMPT, "request")
    _assert_became(driver, instrumented, {"unservable_prefix": len(A)})


@pytest.mark.parametrize("reason", ["aux_window_trim", "device_overlap"])
def test_reasons_that_are_given_by_none(books: Make, instrumented: Instrumented, reason: str) -> None:
    """SGLang's collector has a row for these, and no code of SGLang's gives them, whatever the device and the pools.

    By their description they are for staged prefetches that are released, so one is released for them here.
    """
    driver = books(**BUFFER)
    _store(driver, A)
    request = driver.begin_prefetch(PROMPT, "request")
    driver.wait_for_prefetch(request)
    assert driver.cache.buffer_pipeline.release_staged_hold(request.cache_request_handle, reason=reason)
    _assert_became(driver, instrumented, {reason: len(A)})


def test_no_flow_leads_to_them() -> None:
    """Or else there is a test to write: see those above."""
    sources = {path: path.read_text() for path in Path(sglang.__file__).parent.joinpath("srt").rglob("*.py")}
    for reason in ("aux_window_trim", "device_overlap"):
        assert [path.name for path, text in sources.items() if f'"{reason}"' in text] == ["metrics_collector.py"]
    assert not [path for path, text in sources.items() if 'return "unservable"' in text]


def test_every_reason_of_sglangs_has_a_row_from_the_beginning(
    make: Make, instrumented: Instrumented, tmp_path: Path
) -> None:
    driver = make(storage_dir=tmp_path)
    samples = [sample for family in driver.registry.collect() for sample in family.samples]
    theirs = {sample.labels["reason"] for sample in samples if "prefetch_unfulfilled" in sample.name}
    rows = instrumented.rows.values(semconv.PREFETCH_UNFULFILLED_TOKENS)
    ours = {dict(key)[semconv.KVCACHE_REASON] for key in rows}
    assert len(theirs) > 10
    assert ours == {*theirs, "shrunk", "unservable_prefix", UNCOUNTED}
    assert not any(rows.values())
