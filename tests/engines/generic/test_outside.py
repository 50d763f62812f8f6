"""What a signal handler raises while a reader is at work reaches the engine, and is no failure of the hook."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.engines.generic.conftest import Exported


class TooLongError(Exception):
    """What an engine's own timeout raises."""


class Cache:
    def evict(self, tokens: int) -> int:
        return tokens

    def back_up(self, tokens: int) -> int:
        return tokens


def interrupted(result: int, _: Any) -> int:
    if result < 0:
        signal.raise_signal(signal.SIGUSR1)
    return result


@pytest.fixture(autouse=True)
def handler() -> Generator[None]:
    def handle(number: int, frame: object) -> None:
        raise TooLongError

    previous = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("name", ["evict", "back_up"])
def test_it_goes_through_however_often(exported: Exported, name: str) -> None:
    cache = Cache()
    handle = kv.instrument_controller(
        cache,
        tiers={"device": "kv", "host": "kv"},
        methods={"evict": kv.Eviction(tokens=interrupted), "back_up": kv.Backup(tokens=interrupted, bytes=1)},
        meter_provider=exported.provider,
    )
    for _ in range(2):
        for _ in range(7):
            with pytest.raises(TooLongError):
                getattr(cache, name)(-1)
        assert getattr(cache, name)(5) == 5
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 0
    assert set(handle.attached) == {"evict", "back_up"}
    if name == "back_up":
        assert exported.rows.value(semconv.TRANSFER_ACTIVE, source="device", destination="host") == 0
        assert exported.rows.value(semconv.TRANSFER_OPERATIONS, source="device", destination="host") == 2
    else:
        assert exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 10
    handle.remove()
