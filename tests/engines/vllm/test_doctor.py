"""`kvcache-otel doctor` on the real vLLM."""

from __future__ import annotations

import json

import pytest

from tests.conftest import require

require("vllm")

from kvcache_otel.engines.vllm.table import HOOKS, LIMITS  # noqa: E402
from tests.engines.vllm.programs import BIN, run  # noqa: E402
from tests.support.processes import free_port  # noqa: E402

pytestmark = pytest.mark.engine


def test_every_hook_fits_and_all_is_well() -> None:
    port = str(free_port())
    said = run(
        [BIN / "kvcache-otel", "doctor"],
        {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": port},
    )
    assert said.status == 0, said.out + said.err
    words = " ".join(said.out.split())
    assert f"{len(HOOKS)} of {len(HOOKS)} hooks can be attached" in words
    assert said.out.count("  attached   ") == len(HOOKS)
    assert "MISSING" not in said.out
    assert "evictable blocks of the device tier" in words
    assert "All is well: the KV caches of vLLM 0.32" in words
    assert words.endswith(f"Prometheus at http://localhost:{port}/metrics (OTEL_METRICS_EXPORTER=prometheus).")
    assert [line for line in said.err.splitlines() if "import" not in line] == []


def test_with_nothing_set_it_fails_and_says_what_to_set() -> None:
    said = run([BIN / "kvcache-otel", "doctor", "--engine", "vllm", "--json"], {})
    assert said.status == 1, said.err
    data = json.loads(said.out)
    assert data["summary"].startswith("Nothing would be measured: nothing is exported: set OTEL_METRICS_EXPORTER")
    (found,) = data["engines"]
    assert found["support"] == "full"
    assert [hook["name"] for hook in found["hooks"] if not hook["attached"]] == []
    assert len(found["hooks"]) == len(HOOKS)
    assert found["limits"] == [words for words, before in LIMITS if not before]
    assert {finding["level"] for finding in data["installation"] + found["findings"]} == {"ok"}
