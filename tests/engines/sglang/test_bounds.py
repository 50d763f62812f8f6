"""Much under way: as much as a deep queue has is right, and what is too much is said, and ends its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.sglang import host, prefetch, transfer  # noqa: E402
from tests.engines.sglang import cpu  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.expected import (  # noqa: E402
    BACKUP,
    STORAGE,
    assert_closes,
    assert_equals_recount,
    assert_published_is_held,
    by_reason,
)
from tests.engines.sglang.oracle import own_counters, unsettled  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.sglang.conftest import Instrumented

    Make = Callable[..., CacheDriver]

pytestmark = pytest.mark.engine

MANY = 4200
"""Requests that wait, or backups that are not acknowledged: a queue that is deep, and no more than that."""

FEW = 3
"""As many as may be remembered, for once."""


@pytest.fixture
def timed() -> Iterator[None]:
    """Device events that can be held up."""
    cpu.timed_events(True)
    yield
    cpu.timed_events(False)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, instrumented: Instrumented) -> None:
    """Lets hardly anything be remembered."""
    for module in (host, prefetch, transfer):
        monkeypatch.setattr(module, "MOST", FEW)
    instrumented.forgive(semconv.TELEMETRY_DROPPED)


def _wait(driver: CacheDriver, requests: int) -> list[Any]:
    """Has storage say of so many requests that it had something for them, by SGLang's own word for it."""
    handles = [CacheRequestHandle(f"request-{number}", 0) for number in range(requests)]
    for handle in handles:
        driver.cache._record_storage_prefetch_hit(handle, PAGE)
    return handles


def _prompts(count: int) -> list[range]:
    return [range(number * 10, number * 10 + PAGE) for number in range(1, count + 1)]


def test_a_deep_queue_is_remembered_to_its_end(
    make: Make, instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    handles = _wait(driver, MANY)
    rows = instrumented.rows
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == unsettled(driver) == MANY * PAGE
    assert by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == {}
    for handle in handles:
        driver.cache._finish_storage_prefetch(handle, PAGE - 1, "deadline")
    rows = instrumented.rows
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == unsettled(driver) == 0
    assert rows.value(semconv.PREFETCH_FULFILLED_TOKENS, **STORAGE) == MANY * (PAGE - 1)
    unfulfilled = by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS)
    assert unfulfilled == own_counters(driver).prefetch_unfulfilled_tokens == {"deadline": MANY}
    assert_closes(rows)


@pytest.mark.usefixtures("few")
def test_requests_that_are_too_many_are_forgotten_and_nothing_is_made_of_them(
    make: Make, instrumented: Instrumented, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make(storage_dir=tmp_path)
    handles = _wait(driver, 2 * FEW + 1)
    rows = instrumented.rows
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) is None
    assert rows.value(semconv.TELEMETRY_DROPPED, reason="other") == 2 * FEW
    for handle in handles:
        driver.cache._finish_storage_prefetch(handle, 0, "deadline")
    rows = instrumented.rows
    assert by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == {"deadline": PAGE}, "of the one that was left"
    said = [record.message for record in caplog.records if "forgotten" in record.message]
    assert said == [
        f"kvcache: {FEW} requests that waited for what storage had were forgotten: nobody has said what became of "
        "them; see kvcache.telemetry.dropped"
    ]
    driver.settle()
    driver.detach_storage()
    driver.attach_storage(tmp_path)
    rows = instrumented.rows
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) is None, "the hits do not add up any more"


@pytest.mark.usefixtures("timed")
def test_acknowledgements_that_are_slow_are_waited_for(make: Make, instrumented: Instrumented, core: str) -> None:
    driver = make(core=core, device_tokens=(MANY + 100) * PAGE, host_ratio=2.0)
    with cpu.held_transfers():
        for prompt in _prompts(MANY):
            driver.insert(prompt)
        driver.step()
        rows = instrumented.rows
        assert len(driver.cache.ongoing_write_through) == MANY
        assert rows.value(semconv.TRANSFER_ACTIVE_BLOCKS, **BACKUP) == MANY
        assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 0
    driver.settle()
    assert_equals_recount(instrumented.rows, driver)
    driver.evict(10**6)
    driver.evict_host(100 * PAGE)
    driver.settle()
    rows = instrumented.rows
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == MANY - 100
    assert_equals_recount(rows, driver)
    assert_published_is_held(rows)


@pytest.mark.usefixtures("timed", "few")
def test_backups_that_are_too_many_end_their_rows(
    make: Make, instrumented: Instrumented, core: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make(core=core)
    with cpu.held_transfers():
        for prompt in _prompts(FEW + 1):
            driver.insert(prompt)
            driver.step()
    driver.settle()
    driver.insert(range(1000, 1000 + PAGE))
    driver.settle()
    rows = instrumented.rows
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") is None
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held") == FEW + 2
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) is None
    assert rows.value(semconv.TRANSFER_ACTIVE_BLOCKS, **BACKUP) is None
    assert rows.value(semconv.TRANSFER_TOKENS, **BACKUP, pool="kv") == own_counters(driver).backup_tokens["kv"]
    assert rows.value(semconv.TELEMETRY_DROPPED, reason="other") == 2 * FEW
    said = sorted(record.message for record in caplog.records if "forgotten" in record.message)
    assert [words.partition(" were")[0] for words in said] == [
        f"kvcache: {FEW} backups",
        f"kvcache: {FEW} copies from device to host",
    ]
