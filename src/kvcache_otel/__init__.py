"""OpenTelemetry metrics for the KV caches of LLM inference engines.

Importing this package imports neither an engine nor torch nor the OpenTelemetry SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel.version import __version__

if TYPE_CHECKING:
    from kvcache_otel.instrumentor import KVCacheInstrumentor

__all__ = ["KVCacheInstrumentor", "__version__"]


def __getattr__(name: str) -> Any:
    # The instrumentor's base class takes longer to import than an engine's process should wait for us.
    if name == "KVCacheInstrumentor":
        from kvcache_otel.instrumentor import KVCacheInstrumentor

        return KVCacheInstrumentor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
