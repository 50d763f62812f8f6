"""What `docs/timing.md` shows is run, and each way of timing is what it is said to be there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcache_otel import semconv
from kvcache_otel.instrumentation import instrumentation
from tests.support.fake_device import FakeEvent, FakeStream
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[1] / "docs" / "timing.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Reading:
    """A provider, and what comes out of it."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def rows(self, name: str, cache: str = "MyCache") -> dict[str, Any]:
        """Returns the values of one metric of one cache, by its own labels."""
        data = self._reader.get_metrics_data()
        found: dict[str, Any] = {}
        for resource in data.resource_metrics if data else ():
            for metric in (
                metric for scope in resource.scope_metrics for metric in scope.metrics if metric.name == name
            ):
                for point in metric.data.data_points:
                    own = {
                        key: value for key, value in point.attributes.items() if key not in semconv.IDENTITY_ATTRIBUTES
                    }
                    if point.attributes[semconv.KVCACHE_CACHE_TYPE] == cache:
                        labels = [str(own[key]) for key in semconv.METRICS[name].attributes if key in own]
                        found[" ".join(labels)] = point.value if hasattr(point, "value") else point.count
        return dict(sorted(found.items()))


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    instrumentation.detach()
    made.provider.shutdown()


def test_every_way_of_timing_runs_and_is_what_it_is_said_to_be(reading: Reading) -> None:
    stream = FakeStream()
    names = {
        "provider": reading.provider,
        "side_stream": stream,
        "launch_copy": lambda stream: stream.copy(3.0),
        "start": FakeEvent(),
        "end": FakeEvent(),
        "send_to_store": lambda: {"bytes": 5, "seconds": 0.25},
        "read_from_file": lambda: None,
    }
    for block in BLOCK.findall(PAGE.read_text()):
        exec(block, names)
    stream.run()
    copies = names["copies"]
    assert copies._harvester.flush(20.0)
    wait_until(lambda: sum(reading.rows("kvcache.transfer.duration").values()) >= 4)
    assert reading.rows("kvcache.transfer.duration") == {
        "device host device_event": 1,  # Without torch events of ours tell none; somebody else's do.
        "device host engine_report": 2,
        "device host wall_clock": 1,
    }
    assert reading.rows("kvcache.transfer.operations") == {"device host": 5}
    assert reading.rows("kvcache.transfer.active") == {"device host": 0}
    assert reading.rows("kvcache.transfer.queue.duration") == {"device host": 1}
