"""What the tests of the SGLang adapter share. All of them need the real SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sglang

from kvcache_otel import semconv
from kvcache_otel.engines.hooks import HookSet
from kvcache_otel.engines.sglang.adapter import SglangAdapter
from kvcache_otel.engines.sglang.table import HOOKS
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from tests.support.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_otel.spec import MetricSpec
    from tests.engines.sglang.cache_driver import CacheDriver

HARVEST_SECONDS = 10.0


class Instrumented:
    """SGLang with its hooks attached, recording into a recorder that nobody exports.

    The hooks are put in place without SGLang's registry, from which nothing can be taken off again;
    `test_plugin.py` is about that one.

    Attributes:
        recorder: Where everything is recorded.
        hooks: The hooks.
        adapter: Their bodies.
        ports: How far from the first port each cache's process would listen.
        flushes: How often the adapter asked for an export.
    """

    def __init__(self) -> None:
        self.recorder = Recorder(Identity("sglang", "test"))
        self.flushes = 0
        self._forgiven: set[str] = set()
        self.ports: list[int] = []
        self.adapter = SglangAdapter(self._probe, self._flush)
        self.hooks = HookSet(HOOKS, lambda body: getattr(self.adapter, body), changed=self.adapter.hook_failed)
        self.adapter.watch_hooks(lambda: self.hooks.lost(sglang.__version__), lambda: self.hooks.failed())

    @property
    def rows(self) -> Rows:
        """What was recorded, durations on the device among it."""
        assert self.recorder.harvester.flush(HARVEST_SECONDS), "a finished copy was not read"
        return Rows(self.recorder)

    def _probe(self, identity: Identity, port: int) -> CacheProbe:
        self.ports.append(port)
        return CacheProbe(self.recorder, identity)

    def _flush(self) -> None:
        self.flushes += 1

    def forgive(self, spec: MetricSpec) -> None:
        """Says that a metric about mistakes may have rows above 0: the test has made them, and looked at them."""
        self._forgiven.add(spec.name)

    def assert_sound(self) -> None:
        """No hook failed, nothing was dropped, no bookkeeping contradicted itself."""
        assert {point.hook.name: point.why for point in self.hooks.points if point.errors} == {}
        rows = Rows(self.recorder)
        for spec in (semconv.ACCOUNTING_ERRORS, semconv.TELEMETRY_DROPPED, semconv.TELEMETRY_ERRORS):
            assert spec.name in self._forgiven or rows.total(spec) == 0, rows.values(spec)


@pytest.fixture
def instrumented() -> Iterator[Instrumented]:
    """SGLang, hooked while the test runs. At its end everything must be sound."""
    instrumented = Instrumented()
    instrumented.hooks.attach()
    try:
        yield instrumented
        instrumented.assert_sound()
    finally:
        instrumented.hooks.detach()


@pytest.fixture
def make(instrumented: Instrumented) -> Iterator[Callable[..., CacheDriver]]:
    """Makes drivers of instrumented caches, and closes them in the end."""
    from tests.engines.sglang.cache_driver import making_drivers

    with making_drivers() as make:
        yield make


@pytest.fixture(params=["python", "rust"])
def core(request: pytest.FixtureRequest) -> Any:
    """Either tree core."""
    return request.param
