"""`KVCacheInstrumentor`, for programs that run under ``opentelemetry-instrument`` or instrument themselves."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from kvcache_otel.export.settings import Settings
from kvcache_otel.instrumentation import ENGINES, instrumentation
from kvcache_otel.package import INSTRUMENTS

if TYPE_CHECKING:
    from collections.abc import Collection

_logger = logging.getLogger("kvcache_otel")


class KVCacheInstrumentor(BaseInstrumentor):
    """Instruments the KV caches of every engine that this process imports, before or after this call.

    Caches that were built before are not seen, nor are those that an engine builds in processes of its own: for these,
    set the ``OTEL_*`` variables, and the engine's plugin entry point does the same there.

    Example:
        >>> KVCacheInstrumentor().instrument(meter_provider=provider)
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Returns the engines; the either-or is in the package's extra ``instruments-any``."""
        return INSTRUMENTS

    def _instrument(self, **kwargs: Any) -> None:
        # Never raises: an exception here would keep opentelemetry-instrument from loading whatever comes after.
        try:
            settings = Settings.from_environ(os.environ)
            if settings.forbidden:
                _logger.info("kvcache: not instrumented: %s", settings.reason)
                return
            for engine in ENGINES:
                instrumentation.attach(engine, settings, meter_provider=kwargs.get("meter_provider"))
        except Exception as error:
            with suppress(Exception):  # A handler of somebody's that raises, or an error that has no words.
                _logger.warning("kvcache: not instrumented, the instrumentor itself failed: %r", error)

    def _uninstrument(self, **kwargs: Any) -> None:
        instrumentation.detach()
