"""`kvcache-otel doctor` on the real SGLang, of several releases."""

from __future__ import annotations

import json

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel.engines.sglang.table import HOOKS, LIMITS  # noqa: E402
from kvcache_otel.engines.versions import is_before  # noqa: E402
from tests.engines.sglang.processes import BIN, INSTALLED, run  # noqa: E402
from tests.support.processes import free_port  # noqa: E402

pytestmark = pytest.mark.engine


def test_every_hook_fits_and_all_is_well() -> None:
    port = str(free_port())
    said = run(
        [BIN / "kvcache-otel", "doctor", "--engine", "sglang"],
        {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": port},
    )
    assert said.status == 0, said.out + said.err
    words = " ".join(said.out.split())
    assert f"{len(HOOKS)} of {len(HOOKS)} hooks can be attached" in words
    assert said.out.count("  attached   ") == len(HOOKS)
    assert "MISSING" not in said.out
    assert "entry point kvcache_otel in sglang.srt.plugins: SGLang finds this package" in words
    assert "evictable slots of the host tier" in words
    assert f"All is well: the KV caches of SGLang {INSTALLED} would be measured" in words
    assert words.endswith(f"Prometheus at http://localhost:{port}/metrics (OTEL_METRICS_EXPORTER=prometheus).")
    assert [line for line in said.err.splitlines() if "import" not in line] == []


@pytest.mark.parametrize("version", ["0.5.18", "0.5.19"])
def test_an_older_release_lacks_hooks_and_each_says_what_cannot_be_measured(version: str) -> None:
    said = run(
        [BIN / "kvcache-otel", "doctor", "--engine", "sglang"],
        {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port())},
        version=version,
    )
    assert said.status == 0, said.out + said.err
    words = " ".join(said.out.split())
    missing = [hook for hook in HOOKS if is_before(version, hook.since)]
    assert f"{len(HOOKS) - len(missing)} of {len(HOOKS)} hooks can be attached" in words
    assert "the others are for functions that came with a later SGLang" in words
    assert "every hook that tells a fact is there from 0.5.20 on" in words
    assert said.out.count("  MISSING    ") == len(missing) > 0
    _, _, unmeasured = words.partition("Not measured in this installation:")
    for hook in missing:
        assert f"it is there from SGLang {hook.since} on" in words
        assert (f"- {hook.fact} (hook {hook.name})" in unmeasured) != hook.needless_before
    assert "Rust tree core" not in unmeasured
    for limit, before in LIMITS:
        assert (f"- {limit}" in unmeasured) == (not before or is_before(version, before))
    missed = sum(not hook.needless_before for hook in missing)
    assert f"It works, with {missed} missing hooks (see above): the KV caches of SGLang {version}" in words


@pytest.mark.parametrize("version", ["0.5.20", "0.5.21"])
def test_a_hook_for_what_another_tells_costs_no_fact(version: str) -> None:
    said = run(
        [BIN / "kvcache-otel", "doctor", "--engine", "sglang"],
        {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port())},
        version=version,
    )
    words = " ".join(said.out.split())
    assert f"{len(HOOKS) - 1} of {len(HOOKS)} hooks can be attached" in words
    assert "came with a later SGLang, and cost no fact here" in words
    assert "it is there from SGLang 0.5.22 on, and costs no fact here" in words
    assert "(hook " not in words.partition("Not measured in this installation:")[2]
    assert f"All is well: the KV caches of SGLang {version} would be measured" in words


def test_with_nothing_set_and_another_plugin_allowed_it_fails_and_says_what_to_set() -> None:
    said = run([BIN / "kvcache-otel", "doctor", "--engine", "sglang", "--json"], {"SGLANG_PLUGINS": "other"})
    assert said.status == 1, said.err
    data = json.loads(said.out)
    (found,) = data["engines"]
    assert found["support"] == "full"
    assert [hook["name"] for hook in found["hooks"] if not hook["attached"]] == []
    assert len(found["hooks"]) == len(HOOKS)
    assert found["limits"] == [words for words, before in LIMITS if not before]
    assert data["summary"].startswith("Nothing would be measured: SGLANG_PLUGINS=other allows only what it names")
    remedies = [finding["remedy"] for finding in found["findings"] + data["export"]["findings"] if finding["remedy"]]
    assert remedies == ["unset it or set SGLANG_PLUGINS=other,kvcache_otel"]
    (failure,) = [finding["text"] for finding in data["export"]["findings"]]
    assert failure.startswith("nothing is exported: set OTEL_METRICS_EXPORTER")
