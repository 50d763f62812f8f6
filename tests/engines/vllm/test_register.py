"""What the plugin costs a vLLM process that has imported what vLLM has imported when it loads its plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import require

require("vllm")

pytestmark = pytest.mark.engine

PROGRAM = """
import json, sys, time
import vllm, vllm.v1.engine.core, vllm.v1.executor.multiproc_executor

before = set(sys.modules)
began = time.perf_counter()
from kvcache_otel.plugin import register_vllm
loaded = time.perf_counter()
register_vllm()
registered = time.perf_counter()

from kvcache_otel.instrumentation import instrumentation
attached = sum(point.state == "attached" for point in instrumentation.hooks["vllm"].points)
others = [name for name in set(sys.modules) - before if not name.startswith("kvcache_otel")]
print(json.dumps({"load": loaded - began, "register": registered - loaded, "attached": attached, "others": others}))
"""


def _process() -> dict[str, Any]:
    environ = {**os.environ, "OTEL_METRICS_EXPORTER": "prometheus", "VLLM_LOGGING_LEVEL": "ERROR"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def test_registering_takes_less_than_a_millisecond() -> None:
    processes = [_process() for _ in range(3)]  # The first one may have to compile our files.
    assert [process["others"] for process in processes] == [[]] * 3, "something else is imported for our sake"
    assert all(process["attached"] > 0 for process in processes)
    load, register = (1e3 * min(process[what] for process in processes) for what in ("load", "register"))
    assert register < 1, f"register() takes {register:.2f} ms, loading the plugin {load:.2f} ms before that"
