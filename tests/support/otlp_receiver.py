"""A real OTLP receiver: rotel, a collector written in Rust, which passes on what it got to a sink in the test.

with otlp_receiver() as receiver:
    ...  # export to receiver.grpc_endpoint or receiver.http_endpoint
    row = receiver.wait_for("kvcache.lookup.tokens", {"kvcache.tier": "host"})
    assert row.value == 64
"""

from __future__ import annotations

import socket
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.processes import free_port, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from opentelemetry.test._otlp_test_server import OtlpProtoTestServer


@dataclass(frozen=True)
class Row:
    """One data point as it arrived.

    Attributes:
        name: The metric.
        kind: ``sum``, ``gauge`` or ``histogram``.
        unit: UCUM unit.
        attributes: The point's attributes.
        value: Of a sum or gauge; None of a histogram.
        count: Samples of a histogram, else 0.
        sum: Sum of a histogram, else 0.
        buckets: Samples per bucket of a histogram.
        bounds: Upper bounds of those buckets, one fewer.
        has_extremes: Whether a histogram came with a minimum or a maximum.
        delta: Whether it holds what came since the point before.
        monotonic: Whether a sum only goes up.
        start_ns: Where the point's interval starts, as Unix time.
        time_ns: Where it ends.
        scope: Name of the instrumentation scope.
        resource: The resource's attributes.
    """

    name: str
    kind: str
    unit: str
    attributes: dict[str, str | int | float | bool]
    value: int | float | None
    count: int
    sum: float
    buckets: tuple[int, ...]
    bounds: tuple[float, ...]
    has_extremes: bool
    delta: bool
    monotonic: bool
    start_ns: int
    time_ns: int
    scope: str
    resource: dict[str, str | int | float | bool]


class OtlpReceiver:
    """What a receiver has got so far.

    Attributes:
        grpc_endpoint: For OTEL_EXPORTER_OTLP_ENDPOINT with the protocol ``grpc``.
        http_endpoint: For OTEL_EXPORTER_OTLP_ENDPOINT with the protocol ``http/protobuf``.
    """

    def __init__(self, sink: OtlpProtoTestServer, grpc_port: int, http_port: int) -> None:
        self.grpc_endpoint = f"http://127.0.0.1:{grpc_port}"
        self.http_endpoint = f"http://127.0.0.1:{http_port}"
        self._sink = sink
        self._rows: list[Row] = []
        self._lock = threading.Lock()

    def metrics(self) -> list[Row]:
        """Returns every point that has arrived, oldest first."""
        with self._lock:
            for recorded in self._sink.drain_metrics():
                self._rows.extend(_rows(recorded))
            return list(self._rows)

    def find(self, name: str, attributes: Mapping[str, object] | None = None) -> list[Row]:
        """Returns the points of one metric that have at least these attributes, oldest first."""
        wanted = (attributes or {}).items()
        return [row for row in self.metrics() if row.name == name and wanted <= row.attributes.items()]

    def wait_for(self, name: str, attributes: Mapping[str, object] | None = None, timeout_s: float = 20.0) -> Row:
        """Returns the newest point of one metric that has at least these attributes, as soon as there is one.

        Raises:
            TimeoutError: There is none in time.
        """
        wait_until(lambda: self.find(name, attributes), timeout_s, f"{name} {attributes}")
        return self.find(name, attributes)[-1]


@contextmanager
def otlp_receiver(*, grpc_port: int = 0, http_port: int = 0) -> Generator[OtlpReceiver]:
    """Runs a receiver until the end of the block.

    Args:
        grpc_port: Where it listens for gRPC; 0 for any free port.
        http_port: Where it listens for HTTP; 0 for any free port.

    Yields:
        The receiver, listening.
    """
    # Not every machine has them; a test asks `require("otlp")` before it comes here.
    import rotel
    from opentelemetry.test._otlp_test_server import OtlpProtoTestServer

    grpc_port = grpc_port or free_port()
    http_port = http_port or free_port()
    with tempfile.TemporaryDirectory(prefix="rotel-") as folder, OtlpProtoTestServer() as sink:
        command = [
            str(Path(rotel.__file__).with_name("rotel-agent")),
            "start",
            f"--pid-file={folder}/pid",
            f"--otlp-grpc-endpoint=127.0.0.1:{grpc_port}",
            f"--otlp-http-endpoint=127.0.0.1:{http_port}",
            "--disable-batching",
            "--exporter=otlp",
            "--otlp-exporter-protocol=http",
            f"--otlp-exporter-endpoint=http://127.0.0.1:{sink.port}",
        ]
        with running(command, Path(folder, "log"), lambda: _listens(grpc_port) and _listens(http_port)):
            yield OtlpReceiver(sink, grpc_port, http_port)


def _listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


def _rows(recorded: Any) -> list[Row]:
    metric = recorded.metric
    kind = metric.WhichOneof("data")
    data = getattr(metric, kind)
    return [
        Row(
            name=metric.name,
            kind=kind,
            unit=metric.unit,
            attributes=_attributes(point.attributes),
            value=getattr(point, point.WhichOneof("value")) if kind != "histogram" else None,
            count=point.count if kind == "histogram" else 0,
            sum=point.sum if kind == "histogram" else 0.0,
            buckets=tuple(point.bucket_counts) if kind == "histogram" else (),
            bounds=tuple(point.explicit_bounds) if kind == "histogram" else (),
            has_extremes=kind == "histogram" and (point.HasField("min") or point.HasField("max")),
            delta=getattr(data, "aggregation_temporality", 0) == 1,
            monotonic=getattr(data, "is_monotonic", False),
            start_ns=point.start_time_unix_nano,
            time_ns=point.time_unix_nano,
            scope=recorded.scope.name,
            resource=_attributes(recorded.resource.attributes),
        )
        for point in data.data_points
    ]


def _attributes(pairs: Any) -> dict[str, str | int | float | bool]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
