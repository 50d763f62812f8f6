"""What the tests of the vLLM adapter share. All of them need the real vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.engines.hooks import HookSet
from kvcache_otel.engines.vllm.adapter import VllmAdapter
from kvcache_otel.engines.vllm.table import HOOKS
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from tests.support.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_otel.engines.hooks import Hook


class Instrumented:
    """vLLM with its hooks attached, recording into a recorder that nobody exports.

    Attributes:
        rows: What was recorded.
        hooks: The hooks.
        adapter: Their bodies.
        flushes: How often the adapter asked for an export.
    """

    def __init__(self) -> None:
        recorder = Recorder(Identity("vllm", "test"))
        self.rows = Rows(recorder)
        self.flushes = 0
        self.adapter = VllmAdapter(lambda identity, _port: CacheProbe(recorder, identity), self._flush)
        self.hook(HOOKS, lambda body: getattr(self.adapter, body))

    def hook(self, table: tuple[Hook, ...], resolve: Callable[[str], Callable[..., Any]]) -> None:
        """Has other hooks than the ones it was made with; to be called before they are attached.

        Args:
            table: The hooks.
            resolve: Gives a body by its name.
        """
        self.hooks = hooks = HookSet(table, resolve, changed=self.adapter.hook_failed)
        self.adapter.watch_hooks(lambda: hooks.lost(_version()), hooks.failed)

    def _flush(self) -> None:
        self.flushes += 1

    def assert_sound(self) -> None:
        """No hook failed, nothing was dropped, no bookkeeping contradicted itself."""
        assert {point.hook.name: point.why for point in self.hooks.points if point.errors} == {}
        assert set(self.rows.values(semconv.ACCOUNTING_ERRORS).values()) == {0}
        assert set(self.rows.values(semconv.TELEMETRY_DROPPED).values()) == {0}


def _version() -> str:
    import vllm

    return vllm.__version__


@pytest.fixture
def instrumented() -> Iterator[Instrumented]:
    """vLLM, hooked while the test runs. At its end everything must be sound."""
    instrumented = Instrumented()
    instrumented.hooks.attach()
    try:
        yield instrumented
        instrumented.assert_sound()
    finally:
        instrumented.hooks.detach()
