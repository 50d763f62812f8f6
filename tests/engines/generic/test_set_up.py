"""What is said of a cache and cannot be right is one clear line when it is set up; what can is let through."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy
import pytest

import kvcache_otel as kv
from kvcache_otel import semconv

if TYPE_CHECKING:
    from tests.engines.generic.conftest import Exported

AMOUNTS: dict[str, Any] = {"tokens": 1, "bytes": 1}
ROUTE: dict[str, Any] = {"source": "device", "destination": "host"}
DONE = kv.CopiesDone(**ROUTE)


class Cache:
    def launch(self, key: int) -> int:
        return key

    def poll(self, found: Any) -> Any:
        return found


def instrument(exported: Exported, cache: Cache, **said: Any) -> kv.Instrumented:
    tiers = {"device": "kv", "host": "kv"}
    return kv.instrument_controller(cache, tiers=tiers, cache="C", meter_provider=exported.provider, **said)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "events": (lambda: kv.Backup(**AMOUNTS, events=(1, 2)), TypeError, r"Backup: events= must be a callable"),
    "events of the done": (lambda: kv.CopiesDone(**ROUTE, events=5), TypeError, "CopiesDone: events= must be a call"),
    "lent": (lambda: kv.Backup(**AMOUNTS, lent="yes"), TypeError, "Backup: lent= must be True or False, and not 'yes'"),
    "lent of the done": (lambda: kv.CopiesDone(**ROUTE, lent=1), TypeError, "CopiesDone: lent= must be True or False"),
    "free": (lambda: kv.PoolSize(limit=1, free=5), ValueError, "PoolSize: of limit=1, 5 are not used"),
    "evictable": (lambda: kv.PoolSize(limit=9, free=5, evictable=5), ValueError, "PoolSize: of limit=9, 10 are not"),
    "deadline": (lambda: kv.transfers(**ROUTE, cache="x", deadline_s=10**400), ValueError, "deadline_s is 1000"),
    "endless": (lambda: kv.transfers(**ROUTE, cache="x", deadline_s=10**9999), ValueError, "deadline_s is "),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_right_is_one_line(what: str) -> None:
    make, kind, words = WRONG[what]
    with pytest.raises(kind, match=words) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_deadline_of_an_object_is_looked_at_too(exported: Exported) -> None:
    with pytest.raises(ValueError, match="deadline_s is 1000"):
        instrument(exported, Cache(), methods={"launch": kv.Backup(**AMOUNTS)}, deadline_s=10**400)


@pytest.mark.parametrize(
    "sizes",
    [
        {"limit": 5, "free": 5},
        {"limit": 5, "free": 2, "evictable": 3},
        {"limit": "size", "free": 9},
        {"limit": 1, "free": lambda cache: 9},
    ],
)
def test_a_size_that_may_be_right_is_taken(sizes: dict[str, Any]) -> None:
    kv.PoolSize(**sizes)


@pytest.mark.parametrize(
    ("found", "ended"),
    [
        (numpy.array([1, 2]), 2),
        (numpy.array([1]), 1),
        (numpy.array([], dtype=int), 0),
        ([1, 2, 3], 3),
        ((), 0),
        (None, 0),
        (False, 0),
        (0, 0),
    ],
)
def test_keys_may_be_an_array(exported: Exported, found: Any, ended: int) -> None:
    cache = Cache()
    instrument(exported, cache, methods={"launch": kv.Backup(**AMOUNTS, key=lambda key, _: key), "poll": DONE})
    for key in (1, 2, 3):
        cache.launch(key)
    assert cache.poll(found) is found
    assert exported.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE) == ended
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 0


def said_of_keys(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "CopiesDone" in message]


def test_a_key_by_which_nobody_ends_anything_is_said(exported: Exported, caplog: pytest.LogCaptureFixture) -> None:
    keyed, caches = kv.Backup(**AMOUNTS, key=lambda key, _: key), [Cache() for _ in range(4)]
    with caplog.at_level(logging.WARNING, "kvcache_otel"):
        first = instrument(exported, caches[0], methods={"launch": keyed})
        assert said_of_keys(caplog) == [
            "kvcache: C: launch: no CopiesDone so far says when copies from device to host have ended that have a "
            "key=: until something does they stay active"
        ]
        caplog.clear()
        instrument(exported, caches[1], methods={"launch": keyed, "poll": DONE})
        kv.instrument_controller(caches[2], beside=first, methods={"poll": DONE})
        beside = kv.instrument_tree_core(caches[3], beside=first, methods={"launch": keyed})
        assert said_of_keys(caplog) == []
    assert beside.measured


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "Nothing is exported: set OTEL_METRICS_EXPORTER (otlp, prometheus, console) or OTEL_EXPORTER_OTLP_ENDP"),
        ({"OTEL_METRICS_EXPORTER": "none"}, "Nothing is exported: OTEL_METRICS_EXPORTER=none"),
        ({"OTEL_METRICS_EXPORTER": "nonesuch"}, "Nothing is exported (OTEL_METRICS_EXPORTER=nonesuch): the log says"),
        ({"OTEL_SDK_DISABLED": "true"}, "Nothing is exported: OTEL_SDK_DISABLED=true"),
    ],
)
def test_the_report_says_that_nothing_is_exported(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], words: str
) -> None:
    for variable in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(variable)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    methods = {"launch": kv.Eviction(tokens=1)}
    cache, tree = Cache(), Cache()
    handle = kv.instrument_controller(cache, tiers={"device": "kv"}, methods=methods)
    told = [handle.report()]
    if not environ.get("OTEL_SDK_DISABLED"):
        told.append(kv.instrument_tree_core(tree, beside=handle, methods=methods).report())
    for report in told:
        assert report.splitlines()[-1].startswith(f"  {words}")
        assert report.lower().count("nothing is exported") == 1
    handle.remove()
    assert "xported" not in handle.report()


def test_the_report_of_what_is_exported_says_nothing_of_that(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"launch": kv.Eviction(tokens=1)}
    given = Cache()
    assert "xported" not in instrument(exported, given, methods=methods).report()
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    own = Cache()
    assert "xported" not in kv.instrument_controller(own, tiers={"device": "kv"}, methods=methods).report()
