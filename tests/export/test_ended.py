"""What is forgotten of an SDK that keeps its rows in another place than those we know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.export.ended import forget_ended

SPEC = next(spec for spec in semconv.METRICS.values() if spec.instrument == "counter")


@pytest.mark.parametrize("provider", [object(), SimpleNamespace(_measurement_consumer=None)])
def test_a_provider_that_is_another_is_left_alone(provider: Any) -> None:
    forget_ended(provider, "scope", None)  # pyright: ignore[reportArgumentType]


def test_a_provider_that_keeps_something_else_is_left_alone() -> None:
    asked: list[object] = []

    class Rows:
        def labels(self, spec: object) -> list[dict[str, str]]:
            asked.append(spec)
            return []

    storage = SimpleNamespace(_instrument_view_instrument_matches={_Instrument(): [SimpleNamespace()]})
    consumer = SimpleNamespace(_reader_storages={"reader": storage})
    forget_ended(SimpleNamespace(_measurement_consumer=consumer), "scope", Rows())  # pyright: ignore[reportArgumentType]
    assert asked == [SPEC]


class _Instrument:
    name = SPEC.name
    instrumentation_scope = SimpleNamespace(name="scope")
