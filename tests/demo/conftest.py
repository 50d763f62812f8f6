"""A provider that the tests read from; caches that are all closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.demo.cache import TieredCache
from kvcache_otel.demo.config import Config
from tests.engines.generic.conftest import exported, lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["exported", "lines", "make_cache"]

SMALL: dict[str, Any] = {
    "device_tokens": 48,
    "host_tokens": 64,
    "disk_tokens": 240,
    "page_tokens": 4,
    "token_bytes": 2,
    "prefetch_tokens": 8,
    "storage_thread": False,
    "memory": "plain",
}
"""So small that everything happens within some hundred steps."""


@pytest.fixture
def make_cache() -> Iterator[Callable[..., TieredCache]]:
    made: list[TieredCache] = []

    def make(**options: Any) -> TieredCache:
        made.append(TieredCache(Config(**{**SMALL, **options})))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
