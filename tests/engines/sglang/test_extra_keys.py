"""Prompts with an extra key, as of a LoRA: each has nodes of its own, which SGLang announces under the same hashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel import semconv  # noqa: E402
from tests.engines.sglang import cache_driver  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.expected import assert_equals_recount, assert_published_is_held  # noqa: E402
from tests.engines.sglang.watched import held, published  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.engines.sglang.conftest import Instrumented

pytestmark = pytest.mark.engine

KEYS = (None, "one LoRA", "another LoRA")
BLOCKS = 4
PROMPT = list(range(BLOCKS * PAGE))
TIERS = ("device", "host")


def test_the_same_hashes_of_several_nodes_contradict_nothing(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fixture ends, no bookkeeping may have contradicted itself."""
    driver = make(core=core)
    plain = cache_driver._key

    def store(extra_key: str | None) -> None:
        def keyed(tokens: Sequence[int]) -> object:
            key = plain(tokens)
            key.extra_key = extra_key
            return key

        monkeypatch.setattr(cache_driver, "_key", keyed)
        driver.insert(PROMPT)
        driver.settle()

    for extra_key in KEYS:
        store(extra_key)
    rows = instrumented.rows
    assert_equals_recount(rows, driver)
    for tier in TIERS:
        assert held(rows, tier) == BLOCKS * len(KEYS)
        assert published(rows, tier) == BLOCKS, "distinct hashes"
    driver.evict(BLOCKS * PAGE)
    driver.settle()
    rows = instrumented.rows
    assert (held(rows, "device"), published(rows, "device")) == (BLOCKS * (len(KEYS) - 1), 0), "a removal is final"
    store(KEYS[0])
    assert published(instrumented.rows, "device") == BLOCKS
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    rows = instrumented.rows
    assert_equals_recount(rows, driver)
    assert_published_is_held(rows)
    assert rows.total(semconv.ACCOUNTING_ERRORS) == 0
    for book in driver.cache._kvcache_otel.published._ledger.books.values():
        assert not book.blocks
        assert not book._again, "as many removals as announcements"
