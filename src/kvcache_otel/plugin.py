"""Entry points of the engines' own plugin systems.

They run in every process that an engine starts, most of which own no cache. So they look at the environment, put the
hooks in place and nothing else: no OpenTelemetry SDK, no thread, no socket, and never an exception.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

from kvcache_otel.export.settings import Settings
from kvcache_otel.instrumentation import borrow_handlers, instrumentation

_logger = logging.getLogger("kvcache_otel")


def register_vllm() -> None:
    """``vllm.general_plugins``: hooks vLLM in this process if the environment says where the metrics should go."""
    _register("vllm", "vLLM")


def register_sglang() -> None:
    """``sglang.srt.plugins``: the same for SGLang, in the processes that load a scheduler."""
    _register("sglang", "SGLang")


def _register(engine: str, name: str) -> None:
    try:
        borrow_handlers(engine)
        _attach(engine)
    except Exception as error:
        with suppress(Exception):  # A handler of somebody's that raises, or an error that has no words.
            _logger.warning(
                "kvcache: not instrumented, the plugin itself failed: %r. %s runs as if it were not there", error, name
            )


def _attach(engine: str) -> None:
    if engine in instrumentation.hooks:  # The program has instrumented itself, whatever the environment says.
        return
    settings = Settings.from_environ(os.environ)
    if not settings.enabled and (settings.forbidden or not _provider_exists()):
        for problem in settings.problems:  # Where there is something to export, the first cache says them.
            _logger.warning("kvcache: %s", problem)
        _logger.info("kvcache: not instrumented: %s", settings.reason)
        return
    instrumentation.attach(engine, settings)


def _provider_exists() -> bool:
    # Only a process that has loaded the SDK can have a provider of its own; do not load it to find out, nor anything of
    # ours where nobody has set one. (SGLang loads the SDK in every process, for its traces.)
    if "opentelemetry.sdk.metrics" not in sys.modules:
        return False
    api = sys.modules.get("opentelemetry.metrics._internal")
    if getattr(api, "_METER_PROVIDER", api) is None and not os.environ.get("OTEL_PYTHON_METER_PROVIDER"):
        return False
    from kvcache_otel.export.provider import process_provider

    return process_provider() is not None
