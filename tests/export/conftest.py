"""What the export tests share: an environment without OTEL_*, a process without a MeterProvider, and a journal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from opentelemetry.test.globals_test import reset_metrics_globals

from tests.export.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _pristine_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.startswith("OTEL_") or variable == "PROMETHEUS_MULTIPROC_DIR":
            monkeypatch.delenv(variable)
    reset_metrics_globals()
    yield
    reset_metrics_globals()


@pytest.fixture
def journal() -> Journal:
    return Journal()
