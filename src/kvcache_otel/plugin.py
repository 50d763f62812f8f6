"""Entry points of the engines' own plugin systems.

They run in every process that an engine starts, most of which own no cache. So they look at the environment, put the
hooks in place and nothing else: no OpenTelemetry SDK, no thread, no socket, and never an exception.
"""

from __future__ import annotations

import logging
import os
import sys

from kvcache_otel.export.settings import Settings
from kvcache_otel.instrumentation import instrumentation

_logger = logging.getLogger("kvcache_otel")


def register_vllm() -> None:
    """``vllm.general_plugins``: hooks vLLM in this process if the environment says where the metrics should go."""
    try:
        _borrow_handlers("vllm")
        _register_vllm()
    except Exception as error:
        _logger.warning(
            "kvcache: not instrumented, the plugin itself failed: %r. vLLM runs as if it were not there", error
        )


def _register_vllm() -> None:
    settings = Settings.from_environ(os.environ)
    for problem in settings.problems:
        _logger.warning("kvcache: %s", problem)
    if not settings.enabled and (settings.forbidden or not _provider_exists()):
        _logger.info("kvcache: not instrumented: %s", settings.reason)
        return
    instrumentation.attach("vllm", settings)


def _provider_exists() -> bool:
    # Only a process that has loaded the SDK can have a provider of its own; do not load it to find out.
    if "opentelemetry.sdk.metrics" not in sys.modules:
        return False
    from kvcache_otel.export.provider import process_provider

    return process_provider() is not None


def _borrow_handlers(engine: str) -> None:
    # The engines configure their own loggers and leave the root alone; what we say would be seen by nobody.
    theirs = logging.getLogger(engine)
    if theirs.handlers and not _logger.hasHandlers():
        for handler in theirs.handlers:
            _logger.addHandler(handler)
        _logger.setLevel(theirs.level)
