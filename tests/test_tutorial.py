"""What the pages on one's own engine show is run, in order, and says what they say it says."""

from __future__ import annotations

import contextlib
import io
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

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Page:
    """A page, as far as it can be run.

    Attributes:
        names: What its blocks have defined.
    """

    def __init__(self, name: str, names: dict[str, Any]) -> None:
        self.text = (DOCS / name).read_text()
        self.blocks = [
            (match[1], match[2], self.text[: match.start()].count("\n") + 1) for match in BLOCK.finditer(self.text)
        ]
        self.name = name
        self.names = names

    def run(self) -> int:
        """Runs it; returns how many outputs were compared."""
        compared = 0
        said = ""
        for kind, text, line in self.blocks:
            if kind == "text":
                assert said.strip() == text.strip(), f"{self.name}:{line}"
                compared += 1
                continue
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * line + text, str(DOCS / self.name), "exec"), self.names)
            said = out.getvalue()
        return compared


class Reading:
    """A provider, and what comes out of it."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def rows(self, name: str, cache: str = "Controller") -> dict[str, Any]:
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


def test_the_tutorial_runs_and_says_what_it_says(reading: Reading) -> None:
    page = Page("your-own-engine.md", {"provider": reading.provider, "rows": reading.rows})
    assert page.run() == 6


def test_the_ten_lines_are_no_more_than_they_are_called(reading: Reading) -> None:
    page = Page("your-own-engine.md", {})
    (methods,) = re.findall(r"    methods=\{\n(.*?)\n    \},\n    gauges", page.blocks[1][1], re.DOTALL)
    assert len(methods.splitlines()) <= 10


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
    page = Page("timing.md", names)
    page.run()
    stream.run()
    copies = names["copies"]
    assert copies._harvester.flush(20.0)
    wait_until(lambda: sum(reading.rows("kvcache.transfer.duration", "MyCache").values()) >= 4)
    assert reading.rows("kvcache.transfer.duration", "MyCache") == {
        "device host device_event": 1,  # Without torch events of ours tell none; somebody else's do.
        "device host engine_report": 2,
        "device host wall_clock": 1,
    }
    assert reading.rows("kvcache.transfer.operations", "MyCache") == {"device host": 5}
    assert reading.rows("kvcache.transfer.active", "MyCache") == {"device host": 0}
    assert reading.rows("kvcache.transfer.queue.duration", "MyCache") == {"device host": 1}
