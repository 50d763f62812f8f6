"""OpenTelemetry metrics for the KV caches of LLM inference engines.

Importing this package imports neither an engine nor torch nor the OpenTelemetry SDK.
"""

from __future__ import annotations

from importlib import import_module

from kvcache_otel.version import __version__

TYPE_CHECKING = False  # As `typing` has it: that takes three times as long to import as all else here.
if TYPE_CHECKING:
    from typing import Any

    from kvcache_otel.engines.generic.copies import Backup, CopiesDone, Copy, LoadBack, Restoration, Retraction
    from kvcache_otel.engines.generic.gauges import Gauges, PoolSize
    from kvcache_otel.engines.generic.lookups import Admission, HostInsert, Prefetch
    from kvcache_otel.engines.generic.losses import AllocationFailure, Drop, Eviction, SkippedStore
    from kvcache_otel.engines.generic.marks import measures
    from kvcache_otel.engines.generic.protocols import CacheController, TreeCore
    from kvcache_otel.engines.generic.publications import Publication
    from kvcache_otel.identity import Rank
    from kvcache_otel.instrumentor import KVCacheInstrumentor
    from kvcache_otel.own import instrument_controller, instrument_tree_core, transfers
    from kvcache_otel.record.keys import LATER
    from kvcache_otel.record.streams import CURRENT

__all__ = [
    "CURRENT",
    "LATER",
    "Admission",
    "AllocationFailure",
    "Backup",
    "CacheController",
    "CopiesDone",
    "Copy",
    "Drop",
    "Eviction",
    "Gauges",
    "HostInsert",
    "KVCacheInstrumentor",
    "LoadBack",
    "PoolSize",
    "Prefetch",
    "Publication",
    "Rank",
    "Restoration",
    "Retraction",
    "SkippedStore",
    "TreeCore",
    "__version__",
    "instrument_controller",
    "instrument_tree_core",
    "measures",
    "transfers",
]

# Where each name is. What it takes to import them is more than an engine's process should wait for.
_MODULES = {
    "instrumentor": "KVCacheInstrumentor",
    "identity": "Rank",
    "own": "instrument_controller instrument_tree_core transfers",
    "record.keys": "LATER",
    "record.streams": "CURRENT",
    "engines.generic.copies": "Backup CopiesDone Copy LoadBack Restoration Retraction",
    "engines.generic.gauges": "Gauges PoolSize",
    "engines.generic.lookups": "Admission HostInsert Prefetch",
    "engines.generic.losses": "AllocationFailure Drop Eviction SkippedStore",
    "engines.generic.marks": "measures",
    "engines.generic.protocols": "CacheController TreeCore",
    "engines.generic.publications": "Publication",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
