"""KV events of a cache of one's own: what they add up to, and when that is not known any more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv

if TYPE_CHECKING:
    from tests.engines.generic.conftest import Exported

TIERS: dict[str, Any] = {"device": "kv", "host": "kv"}


@dataclass
class BlockStored:
    block_hashes: list[int]
    medium: str | None = "GPU"


@dataclass
class BlockRemoved:
    block_hashes: list[int]
    medium: str | None = "GPU"


@dataclass
class AllBlocksCleared:
    medium: str | None = None


@dataclass
class Publisher:
    """Publishes what it is given."""

    sent: list[Any] = field(default_factory=list)

    def publish(self, events: list[Any]) -> None:
        self.sent += events


def measured(exported: Exported, publisher: Publisher, **options: Any) -> Any:
    fact = kv.Publication(**{"events": lambda _, call: call.events, **options})
    provider = exported.provider
    return kv.instrument_controller(publisher, tiers=TIERS, methods={"publish": fact}, meter_provider=provider)


def published(exported: Exported) -> dict[str, int | float]:
    values = exported.rows.values(semconv.RESIDENT_BLOCKS)
    assert all(dict(key)[semconv.KVCACHE_VIEW] == "published" for key in values)
    return {str(dict(key)[semconv.KVCACHE_TIER]): value for key, value in values.items()}


def test_events_add_up(exported: Exported) -> None:
    publisher = Publisher()
    measured(exported, publisher)
    assert published(exported) == {"device": 0, "host": 0}
    publisher.publish([BlockStored([1, 2, 3]), BlockStored([1], "CPU"), BlockStored([3])])
    publisher.publish([])
    publisher.publish([BlockRemoved([3, 2])])
    assert len(publisher.sent) == 4
    assert published(exported) == {"device": 1, "host": 1}
    rows = exported.rows
    stored = {"view": "published", "type": "block_stored", "medium": "device"}
    assert rows.value(semconv.EVENTS, **stored) == 2
    assert rows.value(semconv.EVENT_BLOCKS, **stored) == 4
    publisher.publish([AllBlocksCleared()])
    assert published(exported) == {"device": 0, "host": 0}
    publisher.publish([BlockRemoved([7])])
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="unknown_remove") == 1


def test_copies_and_what_is_cleared_are_the_caches_own_affair(exported: Exported) -> None:
    publisher = Publisher()
    measured(exported, publisher, copies=True, clears_device_only=True, tiers=("device",))
    assert published(exported) == {"device": 0}
    publisher.publish([BlockStored([1]), BlockStored([1]), BlockRemoved([1]), BlockStored([1], "CPU")])
    assert published(exported) == {"device": 1, "host": 1}
    publisher.publish([AllBlocksCleared()])
    assert published(exported) == {"device": 0, "host": 1}


def test_calls_that_publish_nothing_are_not_read(exported: Exported) -> None:
    publisher = Publisher()
    measured(exported, publisher, when=lambda _, call: bool(call.events))
    publisher.publish([])
    publisher.publish([BlockStored([1])])
    assert published(exported) == {"device": 1, "host": 0}
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 0


def test_one_that_was_missed_ends_the_rows_for_good(exported: Exported) -> None:
    publisher = Publisher()
    measured(exported, publisher, events=lambda _, call: call.events[:1] + call.events[1])
    publisher.publish([BlockStored([1]), []])
    assert published(exported) == {"device": 1, "host": 0}
    publisher.publish([BlockStored([2])])
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 1
    publisher.publish([BlockStored([3]), []])
    assert published(exported) == {}


def test_what_was_resident_ends_with_the_instrumentation(exported: Exported) -> None:
    publisher = Publisher()
    handle = measured(exported, publisher)
    publisher.publish([BlockStored([1])])
    handle.remove()
    publisher.publish([BlockStored([2])])
    assert published(exported) == {}
    assert exported.rows.total(semconv.EVENT_BLOCKS) == 1


def test_a_tier_that_was_not_declared_is_said_at_once(exported: Exported) -> None:
    publisher = Publisher()
    with pytest.raises(ValueError, match="a publication: the tier 'disk' was not declared"):
        measured(exported, publisher, tiers=("disk",))
    assert "publish" not in vars(publisher)
