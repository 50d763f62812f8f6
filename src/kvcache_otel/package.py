"""What `opentelemetry-instrument` and its tools look up in an instrumentation, under the names that they look for."""

from __future__ import annotations

# None in particular: one engine is enough, and which one is said by the package's extra ``instruments-any``.
INSTRUMENTS: tuple[str, ...] = ()

_instruments = INSTRUMENTS
_supports_metrics = True
_semconv_status = "development"
