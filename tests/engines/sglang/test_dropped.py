"""Tokens that leave the device with no copy in host memory: counted, or no row where SGLang does not tell them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel import semconv  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.oracle import own_counters, recount  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines.sglang.conftest import Instrumented
    from tests.support.rows import Rows

pytestmark = pytest.mark.engine

PROMPT = range(4 * PAGE)

MODES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "write-through": (
        {"write_policy": "write_through"},
        {"host_pressure", "write_through_unbacked_eviction"},
    ),
    "write-back": ({"write_policy": "write_back"}, {"host_pressure"}),
    "selective": ({"write_policy": "write_through_selective"}, set()),
    "buffer": ({"host_memory_mode": "buffer_only", "host_ratio": 4.0}, set()),
}
"""How a cache is configured, and the reasons that have a row."""


def _reasons(rows: Rows) -> set[str]:
    return {str(dict(key)[semconv.KVCACHE_REASON]) for key in rows.values(semconv.DROPPED_TOKENS)}


@pytest.mark.parametrize("mode", MODES)
def test_a_reason_has_a_row_where_sglang_counts_all_of_it(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, mode: str, tmp_path: Path
) -> None:
    options, reasons = MODES[mode]
    make(core=core, storage_dir=tmp_path, **options)
    assert _reasons(instrumented.rows) == reasons
    assert instrumented.rows.total(semconv.DROPPED_TOKENS) == 0


def test_what_is_not_there_yet_is_lost_under_write_through(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str
) -> None:
    """The oracle is the tree: what has left it and is not on the host."""
    driver = make(core=core, host_ratio=0.125)
    driver.insert(PROMPT)
    driver.settle()
    driver.insert(range(1000, 1000 + 4 * PAGE))
    driver.settle()
    before = recount(driver)
    driver.evict(1000)
    driver.settle()
    lost = (before.device_blocks - recount(driver).host_blocks) * PAGE
    rows = instrumented.rows
    assert rows.total(semconv.DROPPED_TOKENS) == lost > 0
    assert own_counters(driver).dropped_tokens == {"write_through_unbacked_eviction": lost}


def test_what_is_stored_selectively_is_lost_and_sglang_does_not_say(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str
) -> None:
    driver = make(core=core, write_policy="write_through_selective")
    driver.insert(PROMPT)  # Once: that is not worth a copy.
    driver.settle()
    assert driver.evict(1000) == len(PROMPT)
    assert recount(driver).nodes == 0
    assert own_counters(driver).dropped_tokens == {}, "if it does one day, ours can"
    assert not instrumented.rows.values(semconv.DROPPED_TOKENS)


def test_another_write_policy_with_another_backend(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, write_policy="write_through_selective")
    assert _reasons(instrumented.rows) == set()
    driver.attach_storage(tmp_path, write_policy="write_through")
    assert _reasons(instrumented.rows) == {"host_pressure", "write_through_unbacked_eviction"}


def test_another_write_policy_with_the_same_backend(
    make: Callable[..., CacheDriver],
    instrumented: Instrumented,
    core: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = make(core=core, storage_dir=tmp_path, write_policy="write_through_selective")
    driver.attach_storage(tmp_path, write_policy="write_through")
    driver.step()
    assert _reasons(instrumented.rows) == {"host_pressure", "write_through_unbacked_eviction"}
    driver.attach_storage(tmp_path, write_policy="write_through_selective")
    driver.step()
    driver.step()
    assert len([line for line in caplog.messages if "kvcache.dropped.tokens says less from now on" in line]) == 1
