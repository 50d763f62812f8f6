"""The rows of a pool whose size is told at once, while the engine goes on."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engines.generic.conftest import Exported

LIMIT = 10


class Engine:
    """Holds all or nothing; between two answers it has changed its mind.

    Attributes:
        level: Limit, free and evictable.
        asked: How often it was asked.
    """

    def __init__(self) -> None:
        self.level: Any = (LIMIT, LIMIT, 0)
        self.asked = 0

    def go_on(self) -> None:
        self.level = (LIMIT, LIMIT - self.level[1], LIMIT - self.level[2])

    def part(self, at: int) -> int:
        answer = self.level[at]
        self.go_on()
        return answer

    def whole(self) -> Any:
        self.asked += 1
        return self.level


def measured(exported: Exported, engine: Engine, size: kv.PoolSize) -> None:
    gauges = kv.Gauges(pools={("device", "kv"): size})
    provider = exported.provider
    kv.instrument_controller(engine, tiers={"device": "kv"}, methods={}, gauges=gauges, meter_provider=provider)


def usage(exported: Exported) -> dict[str, int | float]:
    values = exported.rows.values(semconv.USAGE)
    return {str(dict(key)[semconv.KVCACHE_STATE]): value for key, value in values.items()}


def errors(exported: Exported) -> int | float:
    return exported.rows.total(semconv.ACCOUNTING_ERRORS) + exported.rows.total(semconv.TELEMETRY_ERRORS)


def test_three_answers_may_not_fit_and_one_does(exported: Exported) -> None:
    engine = Engine()
    size = kv.PoolSize(limit=LIMIT, free=lambda engine: engine.part(1), evictable=lambda engine: engine.part(2))
    measured(exported, engine, size)
    assert usage(exported) == {"free": LIMIT, "used": 0, "evictable": LIMIT}
    assert errors(exported) == 1


def test_one_answer_is_asked_for_once(exported: Exported) -> None:
    engine = Engine()
    measured(exported, engine, kv.PoolSize(at_once=Engine.whole))
    assert usage(exported) == {"free": LIMIT, "used": 0, "evictable": 0}
    assert engine.asked == 1
    engine.level = (LIMIT, 2, 5)
    assert usage(exported) == {"free": 2, "used": 3, "evictable": 5}
    assert exported.rows.value(semconv.LIMIT, tier="device", pool="kv") == LIMIT
    assert errors(exported) == 0


@pytest.fixture
def restless() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_it_fits_whatever_the_engine_does_meanwhile(exported: Exported) -> None:
    engine, done = Engine(), threading.Event()
    measured(exported, engine, kv.PoolSize(at_once=Engine.whole))

    def work() -> None:
        while not done.is_set():
            engine.go_on()

    thread = threading.Thread(target=work)
    thread.start()
    seen = {tuple(sorted(usage(exported).items())) for _ in range(2000)}
    done.set()
    thread.join()
    assert seen == {
        (("evictable", 0), ("free", LIMIT), ("used", 0)),
        (("evictable", LIMIT), ("free", 0), ("used", 0)),
    }
    assert errors(exported) == 0


@pytest.mark.parametrize("level", [None, 7, (1, 2), (1, 2, 3, 4), [10, 5, 5], "abc", (10, "5", 5)])
def test_an_answer_that_is_none_ends_the_rows(exported: Exported, level: Any) -> None:
    engine = Engine()
    engine.level = level
    measured(exported, engine, kv.PoolSize(at_once=Engine.whole))
    assert usage(exported) == {}
    assert errors(exported) == 1
    engine.level = (LIMIT, 1, 1)
    assert usage(exported) == {"free": 1, "used": 8, "evictable": 1}
    assert errors(exported) == 1


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"limit": 1},
        {"free": 1, "evictable": 1},
        {"limit": 1, "at_once": Engine.whole},
        {"evictable": 1, "at_once": Engine.whole},
        {"at_once": (1, 1, 0)},
    ],
)
def test_what_does_not_go_together_is_said_at_once(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="at_once="):
        kv.PoolSize(**given)
