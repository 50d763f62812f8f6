"""A Prometheus endpoint of our own: one for each rank, where nobody else's metrics or port get in the way."""

from __future__ import annotations

import errno
import inspect
import io
import logging
import os
import socket
import socketserver
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import REGISTRY, CollectorRegistry

from kvcache_otel.export.readers import CellReader
from kvcache_otel.export.settings import scrape_url

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_otel.record.recorder import Recorder

_logger = logging.getLogger(__name__)

PORTS_TRIED = 64
MAX_CONNECTIONS = 64
_POLL_S = 0.2


class PrometheusReader(CellReader, PrometheusMetricReader):
    """Answers scrapes from a registry that holds nothing but our metrics."""

    def __init__(self, recorder: Recorder) -> None:
        """Args:
        recorder: Whose histograms are added.
        """
        self.registry = CollectorRegistry()
        known = inspect.signature(PrometheusMetricReader.__init__).parameters
        # Scope labels on every series would cost 130 bytes each and tell the same thing each time.
        wanted = {"scope_info_enabled": False, "registry": self.registry}
        super().__init__(recorder, **{name: value for name, value in wanted.items() if name in known})
        if "registry" not in known:  # Older exporters know only the process's own registry.
            REGISTRY.unregister(self._collector)
            self.registry.register(self._collector)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Does nothing: what is collected outside a scrape would be in the next one twice."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Takes the metrics out of the registry."""
        try:
            self.registry.unregister(self._collector)
        except KeyError:
            _logger.debug("kvcache: the Prometheus reader was shut down twice")


class PrometheusServer:
    """An HTTP server on a daemon thread that answers scrapes.

    Attributes:
        port: The port it listens on.
        url: Where to scrape it.
        moved: Why it does not listen on the port that was asked for; empty where it does.
    """

    def __init__(self, registry: CollectorRegistry, host: str, base_port: int, local_rank: int = 0) -> None:
        """Args:
        registry: What it serves.
        host: Address to bind.
        base_port: The port of local rank 0; 0 for any.
        local_rank: Added to `base_port`. Where that port is taken, the next free one serves, and in the end any.

        Raises:
            OSError: The address cannot be bound.
        """
        self._server, self.moved = _bind(host, base_port, local_rank)
        self._server.set_app(_one_at_a_time(registry))
        self.port: int = self._server.server_address[1]
        self.url = scrape_url(host, self.port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="kvcache-prometheus", daemon=True
        )
        self._thread.start()
        _close_in_children(self._server)

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    # Two ranks must never share a port: each scrape would reach one of them by chance. Some Pythons default to it.
    allow_reuse_port = False

    def server_bind(self) -> None:
        """Binds without the base class's reverse look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def get_request(self) -> Any:
        """Accepts a connection; where it cannot, for want of file descriptors, it does not try again at once."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_POLL_S)  # The connection still waits, so nothing else would keep the loop from spinning.
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers on a thread of its own, or hangs up where too many are busy."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # No thread could be started.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Runs on the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does not write a traceback to the engine's standard error for each client that hangs up."""
        _logger.debug("kvcache: the scrape of %s failed", client_address, exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 10  # A client that says nothing keeps a thread so long.

    def log_message(self, format: str, *args: Any) -> None:
        """Does not write each scrape to the engine's standard error."""

    def get_stderr(self) -> Any:
        """Keeps tracebacks away from there too."""
        return io.StringIO()


def free_port(host: str, base_port: int, local_rank: int) -> int:
    """Returns a port that was free a moment ago, for a server that cannot look for one itself.

    Raises:
        OSError: The address cannot be bound.
    """
    server, _ = _bind(host, base_port, local_rank)
    server.server_close()
    return server.server_address[1]


def _bind(host: str, base_port: int, local_rank: int) -> tuple[_Server, str]:
    """Returns a server that listens, and why it is not on the port that was asked for."""
    wanted = base_port + local_rank if base_port else 0
    family, address = _resolve(host)
    kind = _ServerV6 if family == socket.AF_INET6 else _Server
    moved = f"there is no port {wanted}" if wanted > 65_535 else ""
    for port in (*range(wanted, min(wanted + PORTS_TRIED, 65_535) + 1), 0):
        try:
            return kind((address, port), _QuietHandler), moved
        except OSError as error:
            if port == 0 or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            moved = moved or f"port {wanted} of {host} cannot be used: {os.strerror(error.errno)}"
    raise AssertionError("port 0 returns or raises")


def _resolve(host: str) -> tuple[int, str]:
    """Returns an address of a host, of IP version 4 where it has one: scrape configurations say 127.0.0.1."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def _one_at_a_time(registry: CollectorRegistry) -> Any:
    """Returns the WSGI application: two scrapes at once would get each other's samples, mixed."""
    application = cast("Any", prometheus_client).make_wsgi_app(registry)  # Its type is not fully known.
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with lock:
            try:
                return application(environ, start_response)
            except Exception as error:
                _logger.warning("kvcache: a scrape failed: %r", error)
                raise

    return answer


def _close_in_children(server: _Server) -> None:
    """Keeps a forked child from holding a port on which it has no thread to answer."""
    reference = weakref.ref(server)

    def close() -> None:
        if (inherited := reference()) is not None:
            inherited.socket.close()

    os.register_at_fork(after_in_child=close)
