"""`kvcache-otel doctor` on an engine that is made up here: what it finds, what it says and how it ends."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.cli import checks, command, doctor, engine
from kvcache_otel.cli.report import NARROWEST, WIDEST, WIDTH
from kvcache_otel.engines.vllm.table import HOOKS
from kvcache_otel.instrumentation import ENGINES
from kvcache_otel.record import cells
from kvcache_otel.version import __version__
from tests.cli import fake_engine
from tests.cli.said import Said
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Doctor = Callable[..., Said]


@pytest.fixture(autouse=True)
def _pristine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.startswith(("OTEL_", "VLLM_", "SGLANG_", "PROMETHEUS_", "COLUMNS")):
            monkeypatch.delenv(variable)
    _pretend(monkeypatch, installed=True)
    fake_engine.forget(monkeypatch)
    fake_engine.hide_real_ones(monkeypatch, tmp_path / "site")
    yield
    for name in fake_engine.imported():
        del sys.modules[name]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the doctor in this process, with some variables set."""

    def run(*arguments: str, **environ: str) -> Said:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        status = command.run(["doctor", *arguments])
        return Said(status, *capsys.readouterr())

    return run


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a made-up engine; arguments as for `fake_engine.write`."""

    def make(name: str = "vllm", **options: Any) -> None:
        fake_engine.write(tmp_path / "site", name, **options)
        monkeypatch.syspath_prepend(tmp_path / "site")
        importlib.invalidate_caches()

    return make


@pytest.fixture
def vllm(make: Callable[..., None]) -> None:
    """A made-up vLLM in which every hook fits."""
    make()


@pytest.fixture(params=sorted(ENGINES))
def each(request: pytest.FixtureRequest, make: Callable[..., None]) -> str:
    """Each engine in its turn, made up, with every hook."""
    make(request.param)
    return request.param


def _pretend(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    for module in (checks, engine):
        monkeypatch.setattr(module, "entry_points", fake_engine.entry_points(installed=installed))


def _prometheus() -> dict[str, str]:
    return {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": str(free_port())}


# -- all is well -------------------------------------------------------------------------------------------------------


def test_all_is_well(run: Doctor, each: str) -> None:
    environ, table = _prometheus(), fake_engine.table(each)
    said = run(**environ)
    assert said.status == 0
    assert f"{len(table.HOOKS)} of {len(table.HOOKS)} hooks" in said.words
    for hook in table.HOOKS:
        assert re.search(rf"^  attached +{re.escape(hook.name)}\s+{re.escape(hook.path)}$", said.out, re.MULTILINE)
    assert "MISSING" not in said.out
    assert f"entry point kvcache_otel in {table.PLUGIN_GROUP}: {table.NAME} finds this package" in said.words
    assert f"python {sys.version.split()[0]}" in said.words
    port = environ["OTEL_EXPORTER_PROMETHEUS_PORT"]
    assert (
        f"port {port} of localhost is free: rank n of this machine listens on {port} + n, a scheduler process without "
        "a rank after the last of them"
    ) in said.words
    assert said.sentence == (
        f"All is well: the KV caches of {table.NAME} {fake_engine.VERSIONS[each]} would be measured, and exported: "
        f"Prometheus at http://localhost:{port}/metrics (OTEL_METRICS_EXPORTER=prometheus)."
    )


@pytest.mark.parametrize(
    ("columns", "width"),
    [("", WIDTH), ("x", WIDTH), ("0", WIDTH), ("60", 60), ("90", 90), ("1", NARROWEST), ("500", WIDEST)],
)
def test_the_text_is_as_wide_as_the_terminal_and_never_very_wide(
    run: Doctor, each: str, columns: str, width: int
) -> None:
    variables = {"OTEL_METRICS_EXPORTER": "prometheus,otlp,nonsense", "VLLM_PLUGINS": "x", "SGLANG_PLUGINS": "x"}
    said = run(**variables, COLUMNS=columns)
    lengths = {len(line): line for line in said.out.splitlines()}
    # A word that is longer stands alone on its line.
    assert [line for length, line in lengths.items() if length > width and len(line.split()) > 1] == []
    assert max(lengths) > width - 8
    assert said.words == run(**variables, COLUMNS="80").words


def test_progress_goes_elsewhere(run: Doctor, each: str) -> None:
    said = run(OTEL_METRICS_EXPORTER="prometheus")
    assert f"importing {fake_engine.table(each).NAME}, which takes about 10 s" in said.err
    assert "importing" not in said.out


def test_the_engine_has_its_own_functions_back(run: Doctor, each: str) -> None:
    run(**_prometheus())
    for hook in fake_engine.table(each).HOOKS:
        owner, _, name = hook.path.partition(".")
        function = getattr(getattr(sys.modules[hook.module], owner), name)
        assert not hasattr(function, "__wrapped__")


def test_an_engines_own_registry_is_left_alone(run: Doctor, make: Callable[..., None], tmp_path: Path) -> None:
    """SGLang's would keep what it is given for as long as the process lives."""
    make("sglang")
    plugins = tmp_path / "site" / "sglang" / "srt" / "plugins"
    plugins.mkdir()
    (plugins / "__init__.py").touch()
    (plugins / "hook_registry.py").write_text("raise AssertionError('asked for')\n")
    said = run(**_prometheus())
    assert said.sentence.startswith("All is well: the KV caches of SGLang")
    assert "sglang.srt.plugins" not in sys.modules


def test_json_tells_the_same(run: Doctor, each: str) -> None:
    table = fake_engine.table(each)
    environ = {**_prometheus(), "OTEL_METRIC_EXPORT_INTERVAL": "soon", "PROMETHEUS_MULTIPROC_DIR": "somewhere"}
    text = run(**environ)
    told = run("--json", **environ)
    data = told.data
    assert (told.status, data["status"]) == (text.status, text.status)
    assert data["summary"] == text.sentence
    assert data["versions"]["kvcache-otel"] == __version__
    (found,) = data["engines"]
    assert (found["name"], found["version"], found["support"]) == (table.NAME, fake_engine.VERSIONS[each], "full")
    told_hooks = {hook["name"]: (hook["target"], hook["since"]) for hook in found["hooks"]}
    assert told_hooks == {hook.name: (hook.target, hook.since) for hook in table.HOOKS}
    assert all(hook["attached"] for hook in found["hooks"])
    assert data["export"]["exporters"] == ["prometheus"]
    assert data["export"]["variable"] == "OTEL_METRICS_EXPORTER=prometheus"
    findings = data["installation"] + found["findings"] + data["export"]["findings"]
    assert {finding["level"] for finding in findings} == {"ok", "note", "warning"}
    for words in [finding["text"] for finding in findings] + found["limits"]:
        assert words in text.words


# -- nothing would be measured, or nothing exported --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "why", "remedy"),
    [
        ({}, "nothing is exported: set OTEL_METRICS_EXPORTER", "or OTEL_EXPORTER_OTLP_ENDPOINT."),
        ({"OTEL_METRICS_EXPORTER": "none"}, "OTEL_METRICS_EXPORTER=none", "set OTEL_METRICS_EXPORTER to"),
        ({"OTEL_METRICS_EXPORTER": "nonsense"}, "no exporter that can be used", "set OTEL_METRICS_EXPORTER to"),
        ({"OTEL_SDK_DISABLED": "true"}, "OTEL_SDK_DISABLED=true", "unset OTEL_SDK_DISABLED"),
        (
            {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "kvcache"},
            "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS has kvcache",
            "unset OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
        ),
        ({"OTEL_CONFIG_FILE": "absent.yaml"}, "OTEL_CONFIG_FILE=absent.yaml", "correct the file"),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus", "VLLM_PLUGINS": "other"},
            "VLLM_PLUGINS=other allows only what it names",
            "set VLLM_PLUGINS=other,kvcache_otel",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus", "VLLM_PLUGINS": ""},
            "VLLM_PLUGINS= allows only what it names",
            "set VLLM_PLUGINS=kvcache_otel",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus", "VLLM_PLUGINS": "other, kvcache_otel"},
            "VLLM_PLUGINS=other, kvcache_otel allows only what it names",
            "set VLLM_PLUGINS=other,kvcache_otel",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_HOST": "192.0.2.1"},
            "OTEL_EXPORTER_PROMETHEUS_HOST=192.0.2.1 cannot be bound",
            "an address of this machine",
        ),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_what_the_environment_forbids(run: Doctor, environ: dict[str, str], why: str, remedy: str) -> None:
    said = run(**environ)
    _assert_fails(said, why, remedy)


@pytest.mark.parametrize("name", ["other,kvcache_otel", " kvcache_otel , other", "", "kvcache_otel,"])
def test_what_sglangs_list_allows(run: Doctor, make: Callable[..., None], name: str) -> None:
    """SGLang lets everything in where its list is empty, and takes blanks off names; vLLM does neither."""
    make("sglang")
    said = run(SGLANG_PLUGINS=name, VLLM_PLUGINS="another engine's", **_prometheus())
    assert said.status == 0
    assert " ".join(f"ok SGLANG_PLUGINS={name} allows kvcache_otel".split()) in said.words
    assert "VLLM_PLUGINS" not in said.out


@pytest.mark.parametrize("name", ["other", "other,kvcache-otel", " ", ",", "KVCACHE_OTEL"])
def test_what_sglangs_list_does_not_allow(run: Doctor, make: Callable[..., None], name: str) -> None:
    make("sglang")
    said = run(SGLANG_PLUGINS=name, **_prometheus())
    wanted = ",".join([*(part for part in name.split(",") if part.strip()), "kvcache_otel"])
    _assert_fails(said, "allows only what it names, and kvcache_otel is not", f"set SGLANG_PLUGINS={wanted}")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("file_format: '1.0'\ndisabled: true\n", "says disabled: true"),
        ("file_format: '1.0'\n", "has no meter_provider"),
        ("meter_provider: [}\n", "cannot be used"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_a_configuration_file_that_yields_nothing(run: Doctor, tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "otel.yaml").write_text(content)
    _assert_fails(run(OTEL_CONFIG_FILE=str(tmp_path / "otel.yaml")), why, "correct the file or unset it")


@pytest.mark.usefixtures("vllm")
def test_a_configuration_file_that_works(run: Doctor, tmp_path: Path) -> None:
    (tmp_path / "otel.yaml").write_text(
        "file_format: '1.0'\nmeter_provider:\n  readers:\n    - periodic:\n        exporter:\n          console: {}\n"
    )
    said = run(OTEL_CONFIG_FILE=str(tmp_path / "otel.yaml"))
    assert said.status == 0
    assert said.sentence.startswith("All is well")
    assert "what the file of OTEL_CONFIG_FILE=" in said.words


def test_not_installed(run: Doctor, monkeypatch: pytest.MonkeyPatch, each: str) -> None:
    _pretend(monkeypatch, installed=False)
    said = run(**_prometheus())
    group = fake_engine.table(each).PLUGIN_GROUP
    _assert_fails(said, f"no entry point kvcache_otel in {group}", "install kvcache-otel with pip")
    assert "warning no entry point kvcache in opentelemetry_instrumentor" in said.words


@pytest.mark.usefixtures("vllm")
def test_a_free_threaded_python(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "EXACT", False)
    _assert_fails(run(**_prometheus()), "this Python runs without a global lock", "PYTHON_GIL=1")


@pytest.mark.parametrize(
    ("arguments", "which"),
    [((), "vllm or sglang"), (("--engine", "vllm"), "vllm"), (("--engine", "sglang"), "sglang")],
)
def test_no_engine(run: Doctor, arguments: tuple[str, ...], which: str) -> None:
    said = run(*arguments, **_prometheus())
    _assert_fails(said, f"no engine is installed for this Python ({which})", "install one")
    assert "kvcache-otel doctor MODULE:NAME" in said.words
    assert "importing" not in said.err


def test_another_engine_than_the_one_that_is_asked_for(run: Doctor, make: Callable[..., None]) -> None:
    make("vllm")
    said = run("--engine", "sglang", **_prometheus())
    _assert_fails(said, "no engine is installed for this Python (sglang)", "install one")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise RuntimeError('no\\nCUDA')", "importing vllm fails: RuntimeError: no CUDA"),
        ("import sys; sys.exit(3)", "importing vllm fails: SystemExit: 3"),
        ("import absent_library", "there is no module absent_library"),
        ("class Odd(BaseException): pass\nraise Odd('no')", "importing vllm fails: Odd: no"),
        (
            "class Mute(Exception):\n def __str__(self): raise RuntimeError(self)\n __repr__ = __str__\nraise Mute",
            "importing vllm fails: Mute",
        ),
        ("raise ModuleNotFoundError('gone')", "importing vllm fails: ModuleNotFoundError: gone"),
    ],
)
def test_an_engine_that_cannot_be_imported(run: Doctor, make: Callable[..., None], body: str, why: str) -> None:
    make(body=body)
    _assert_fails(run(**_prometheus()), f"vLLM cannot be imported: {why}", "repair the installation of vLLM")


@pytest.mark.parametrize(("name", "supported"), [("vllm", "vLLM 0.28 to 0.33"), ("sglang", "SGLang 0.5.18 to 0.5.23")])
def test_an_engine_that_no_hook_fits(run: Doctor, make: Callable[..., None], name: str, supported: str) -> None:
    hooks = fake_engine.table(name).HOOKS
    make(name, version="0.1.1", without=[hook.name for hook in hooks])
    said = run(**_prometheus())
    _assert_fails(said, f"no hook fits this {supported.partition(' ')[0]}", f"use {supported}")
    assert said.out.count("MISSING") == len(hooks)


def test_several_failures_are_counted(run: Doctor) -> None:
    said = run()
    assert said.status == 1
    assert "2 failures in all, see above" in said.sentence


def _assert_fails(said: Said, why: str, remedy: str) -> None:
    assert said.status == 1
    assert "FAILURE" in said.out
    assert why in said.words
    assert said.sentence.startswith("Nothing would be measured: ")
    assert why in said.sentence
    assert remedy in said.sentence
    assert "Traceback" not in said.out + said.err


# -- two engines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def both(make: Callable[..., None]) -> None:
    """Two made-up engines, each with every hook."""
    for name in ENGINES:
        make(name)


@pytest.mark.usefixtures("both")
def test_two_engines_are_both_looked_at(run: Doctor) -> None:
    environ = _prometheus()
    said = run(**environ)
    assert said.status == 0
    assert re.findall(r"^(\S+) \d\S+$", said.out, re.MULTILINE)[-2:] == ["vLLM", "SGLang"]
    assert said.out.count("  attached   ") == sum(len(fake_engine.table(name).HOOKS) for name in ENGINES)
    assert said.sentence.startswith("All is well: the KV caches of vLLM 0.32.0 and SGLang 0.5.23 would be measured")
    data = run("--json", **environ).data
    assert [(found["name"], len(found["hooks"])) for found in data["engines"]] == [
        (fake_engine.table(name).NAME, len(fake_engine.table(name).HOOKS)) for name in ENGINES
    ]
    assert data["summary"] == said.sentence


@pytest.mark.usefixtures("both")
def test_one_engine_of_two_that_is_asked_for(run: Doctor) -> None:
    said = run("--engine", "sglang", VLLM_PLUGINS="other", **_prometheus())
    assert said.sentence.startswith("All is well: the KV caches of SGLang 0.5.23 would be measured")
    assert "vLLM" not in said.out + said.err


def test_one_engine_of_two_that_cannot_be_measured(run: Doctor, make: Callable[..., None]) -> None:
    make("vllm", body="raise RuntimeError('no CUDA')")
    make("sglang", without=["cache.reset"])
    said = run("--json", **_prometheus())
    assert (said.status, said.data["status"]) == (0, 0)
    assert said.data["summary"].startswith(
        "It works, with 1 failure and 1 warning and 1 missing hook (see above): the KV caches of SGLang 0.5.23 would "
        "be measured, and exported: Prometheus at http://localhost:"
    )
    assert said.data["summary"].endswith(
        " Nothing would be measured of vLLM: vLLM cannot be imported: importing vllm fails: RuntimeError: no CUDA; "
        "repair the installation of vLLM."
    )


@pytest.mark.usefixtures("both")
def test_each_engine_has_a_list_of_its_own(run: Doctor) -> None:
    said = run(VLLM_PLUGINS="other", SGLANG_PLUGINS="kvcache_otel", **_prometheus())
    assert said.status == 0
    assert "ok SGLANG_PLUGINS=kvcache_otel allows kvcache_otel" in said.words
    assert said.sentence.startswith("It works, with 1 failure (see above): the KV caches of SGLang 0.5.23 would be")
    assert "Nothing would be measured of vLLM 0.32.0: VLLM_PLUGINS=other allows only what it names" in said.sentence


@pytest.mark.usefixtures("both")
def test_two_engines_neither_of_which_can_be_measured(run: Doctor) -> None:
    said = run(VLLM_PLUGINS="other", SGLANG_PLUGINS="other", **_prometheus())
    _assert_fails(said, "VLLM_PLUGINS=other allows only what it names", "(2 failures in all, see above).")


@pytest.mark.usefixtures("both")
def test_what_keeps_all_from_being_exported_comes_before_what_keeps_one_from_being_measured(run: Doctor) -> None:
    said = run(VLLM_PLUGINS="other")
    _assert_fails(said, "nothing is exported: set OTEL_METRICS_EXPORTER", "(2 failures in all, see above).")


# -- something is amiss, and it works all the same ---------------------------------------------------------------------


def test_a_missing_hook_says_why_and_what_is_lost(run: Doctor, make: Callable[..., None]) -> None:
    make(without=["cpu.prepare_store"])
    environ = _prometheus()
    said = run(**environ)
    assert said.status == 0
    assert (
        "MISSING cpu.prepare_store vllm.v1.kv_offload.cpu.manager has no CPUOffloadingManager.prepare_store"
        in said.words
    )
    assert "- evictions from the host tier (hook cpu.prepare_store)" in said.words
    assert said.sentence.startswith("It works, with 1 warning and 1 missing hook (see above): ")
    (missing,) = [hook for hook in run("--json", **environ).data["engines"][0]["hooks"] if not hook["attached"]]
    assert missing["fact"] == "evictions from the host tier"


def test_a_module_that_cannot_be_imported_is_said_at_its_hooks(
    run: Doctor, make: Callable[..., None], tmp_path: Path
) -> None:
    make()
    file = tmp_path / "site" / "vllm" / "v1" / "kv_offload" / "cpu" / "gpu_worker.py"
    file.write_text("raise ImportError('libcudart.so.13')")
    said = run(**_prometheus())
    assert said.status == 0
    assert said.out.count("MISSING") == sum(hook.module == "vllm.v1.kv_offload.cpu.gpu_worker" for hook in HOOKS)
    assert "importing vllm.v1.kv_offload.cpu.gpu_worker fails: ImportError: libcudart.so.13" in said.words


def test_hooks_for_what_came_with_a_later_version(run: Doctor, make: Callable[..., None]) -> None:
    later = fake_engine.later("sglang", "0.5.18")
    make("sglang", version="0.5.18", without=later)
    environ = _prometheus()
    said = run(**environ)
    hooks = fake_engine.table("sglang").HOOKS
    assert said.status == 0
    supported = "ok version 0.5.18: supported are 0.5.18 to 0.5.23"
    assert f"{supported}; every hook that tells a fact is there from 0.5.20 on" in said.words
    assert (
        f"note {len(hooks) - len(later)} of {len(hooks)} hooks can be attached: the others are for functions that came "
        "with a later SGLang"
    ) in said.words
    cache = "sglang.srt.mem_cache.unified_radix_cache has no UnifiedRadixCache"
    for missing, since in (
        (f"prefetch.loaded {cache}._check_hybrid_prefetch_result", "0.5.19"),
        (f"prefetch.hit {cache}._record_storage_prefetch_hit", "0.5.20"),
        ("rust_core.insert_host there is no module sglang.srt.mem_cache.rust_tree_core", "0.5.19"),
    ):
        assert f"MISSING {missing}; it is there from SGLang {since} on" in said.words
    assert "- how much of what storage had is used (hook prefetch.finished)" in said.words
    for needless in ("adder.admitted", "rust_core.insert_host", "prefetch.covered"):
        assert f"(hook {needless})" not in said.words  # Nothing is lost without it.
    assert said.words.count(" on, and costs no fact here") == sum(hook.needless_before for hook in hooks)
    assert "- most models: before 0.5.19 they get that cache only with SGLANG_ENABLE_UNIFIED_RADIX_TREE=1" in said.words
    missed = sum(not hook.needless_before for hook in hooks if hook.name in later)
    assert said.sentence.startswith(f"It works, with {missed} missing hooks (see above): ")
    (found,) = run("--json", **environ).data["engines"]
    assert found["support"] == "partial"
    assert {hook["name"]: hook["since"] for hook in found["hooks"] if not hook["attached"]} == {
        hook.name: hook.since for hook in hooks if hook.name in later
    }


@pytest.mark.parametrize("version", ["0.5.20", "dev"])
def test_a_hook_that_its_version_should_have_is_a_warning(run: Doctor, make: Callable[..., None], version: str) -> None:
    make("sglang", version=version, without=[*fake_engine.later("sglang", version), "cache.evict"])
    (found,) = run("--json", **_prometheus()).data["engines"]
    warned = found["findings"][-1]
    assert warned["level"] == "warning"
    assert re.fullmatch(r"\d+ of \d+ hooks can be attached", warned["text"])
    (why,) = [hook["why"] for hook in found["hooks"] if hook["name"] == "cache.evict"]
    assert why == "sglang.srt.mem_cache.unified_radix_cache has no UnifiedRadixCache._evict_components"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.99.1", "vLLM 0.99.1 is outside 0.28 to 0.33, the versions that are supported"),
        ("0.27.3", "vLLM 0.27.3 is outside 0.28 to 0.33, the versions that are supported"),
        ("dev", "vLLM says 'dev' for its version, which cannot be compared with 0.28 to 0.33"),
        ("0.5.24", "SGLang 0.5.24 is outside 0.5.18 to 0.5.23, the versions that are supported"),
        ("0.5.17", "SGLang 0.5.17 is outside 0.5.18 to 0.5.23, the versions that are supported"),
        ("0.0.0.dev1+g1", "SGLang 0.0.0.dev1+g1 is outside 0.5.18 to 0.5.23, the versions that are supported"),
    ],
)
def test_a_version_that_nobody_has_checked(run: Doctor, make: Callable[..., None], version: str, words: str) -> None:
    make(words.partition(" ")[0].lower(), version=version)
    said = run(**_prometheus())
    assert said.status == 0
    assert f"warning {words}: what is found is hooked all the same, but nobody has checked its numbers" in said.words
    assert said.sentence.startswith("It works, with 1 warning (see above): ")


@pytest.mark.parametrize(
    ("name", "version", "support", "more"),
    [
        ("vllm", "0.29.1", "partial", 2),
        ("vllm", "0.31.0", "full", 1),
        ("vllm", "0.33", "full", 0),
        ("sglang", "0.5.18.post1", "partial", 2),
        ("sglang", "0.5.19.post1", "partial", 1),
        ("sglang", "0.5.20.post1", "full", 1),
        ("sglang", "0.5.22", "full", 0),
    ],
)
def test_what_older_versions_cannot_tell(
    run: Doctor, make: Callable[..., None], name: str, version: str, support: str, more: int
) -> None:
    make(name, version=version)
    said = run("--json", **_prometheus())
    (found,) = said.data["engines"]
    assert said.status == 0
    assert found["support"] == support
    always = [words for words, before in fake_engine.table(name).LIMITS if not before]
    assert found["limits"][: len(always)] == always
    assert len(found["limits"]) == len(always) + more


@pytest.mark.usefixtures("vllm")
def test_a_setting_that_is_wrong(run: Doctor) -> None:
    said = run(OTEL_METRICS_EXPORTER="console", OTEL_METRIC_EXPORT_INTERVAL="soon")
    assert said.status == 0
    assert "warning OTEL_METRIC_EXPORT_INTERVAL=soon is not a number of milliseconds" in said.words


@pytest.mark.usefixtures("vllm")
def test_one_exporter_of_two_cannot_be_used(run: Doctor) -> None:
    said = run(OTEL_METRICS_EXPORTER="nonsense,console")
    assert said.status == 0
    assert "warning nothing is exported by nonsense (OTEL_METRICS_EXPORTER=nonsense,console)" in said.words
    assert "exported: console every 10 s" in said.sentence


# -- the other end -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm")
def test_a_port_that_is_taken(run: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = run(OTEL_METRICS_EXPORTER="prometheus", OTEL_EXPORTER_PROMETHEUS_PORT=str(port))
    assert said.status == 0
    assert f"warning port {port} of localhost cannot be used now: Address already in use" in said.words


@pytest.mark.usefixtures("vllm")
def test_any_port_is_a_note(run: Doctor) -> None:
    said = run(OTEL_METRICS_EXPORTER="prometheus", OTEL_EXPORTER_PROMETHEUS_PORT="0")
    assert said.sentence.startswith("All is well")
    assert "note every rank and a scheduler process without a rank listens on any free port" in said.words


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.usefixtures("vllm")
def test_nothing_listens_at_the_collectors_address(run: Doctor, protocol: str) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    said = run(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    assert said.status == 0
    assert f"warning nothing listens at {endpoint}" in said.words
    assert f"OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}" in said.words


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{}", "127.0.0.1:{}"])
@pytest.mark.usefixtures("vllm")
def test_a_collector_is_called_and_told_nothing(run: Doctor, endpoint: str) -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(5)
                received.append(connection.recv(1000))

        listener = threading.Thread(target=accept)
        listener.start()
        said = run(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint.format(port))
        listener.join(10)
    assert said.status == 0
    assert f"ok something listens at 127.0.0.1:{port}" in said.words
    assert received == [b""]


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:port", "http://no such host", "http://[::1"])
@pytest.mark.usefixtures("vllm")
def test_an_address_that_is_none_is_a_warning(run: Doctor, endpoint: str) -> None:
    said = run(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert said.status == 0
    assert "warning nothing listens at" in said.words


# -- never a traceback -------------------------------------------------------------------------------------------------


def test_what_the_engine_prints_does_not_get_into_the_report(run: Doctor, make: Callable[..., None]) -> None:
    make(body="import logging, warnings; print('hello'); warnings.warn('old'); logging.getLogger('vllm').error('oh')")
    said = run("--json", **_prometheus())
    assert said.data["status"] == 0
    assert [line for line in said.err.splitlines() if "import" not in line] == []


@pytest.mark.usefixtures("vllm")
def test_what_goes_to_the_file_descriptor_does_not_get_into_the_report(make: Callable[..., None]) -> None:
    make(
        body="import ctypes, os, sys; os.write(1, b'raw '); ctypes.CDLL(None).puts(b'buffered')\n"
        "sys.__stdout__.write('original '); os.system('echo shell')"
    )
    done = _process("--json", OTEL_METRICS_EXPORTER="console")
    assert json.loads(done.stdout)["engines"][0]["version"] == "0.32.0"
    for word in ("raw", "buffered", "original", "shell"):
        assert word in done.stderr


def test_a_terminal_that_knows_ascii_alone(make: Callable[..., None]) -> None:
    make()
    done = _process(VLLM_PLUGINS="kvcache_otel,数\udcff", PYTHONIOENCODING="ascii", LANG="C")
    assert done.returncode == 1
    assert "Nothing would be measured" in done.stdout


def _process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the doctor in a process of its own, which finds what this one does."""
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", "from kvcache_otel.cli import main; raise SystemExit(main())", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "body",
    [
        "class Mute:\n    def __str__(self): raise RuntimeError(self)\n    __repr__ = __str__\n__version__ = Mute()",
        "__version__ = '9' * 5000 + '.1'",
        "__version__ = '0.' + '9' * 5000",
        "__version__ = '0.32\\n数'",
    ],
)
def test_a_version_that_is_none(run: Doctor, make: Callable[..., None], body: str) -> None:
    make(body=body)
    said = run(**_prometheus())
    assert said.status == 0
    assert "nobody has checked its numbers" in said.words
    assert max(map(len, said.out.split())) < 250


@pytest.mark.usefixtures("vllm")
def test_an_engine_that_exits_when_it_is_hooked(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(engine.HookSet, "attach", attach)
    _assert_fails(run(**_prometheus()), "the hooks of vLLM cannot be attached: SystemExit: 3", "use another vLLM")


@pytest.mark.usefixtures("vllm")
def test_variables_without_end_are_shortened(run: Doctor) -> None:
    for variable in ("OTEL_CONFIG_FILE", "VLLM_PLUGINS", "OTEL_METRICS_EXPORTER"):
        said = run(**{variable: "x" * 5000})
        assert said.status == 1
        assert max(map(len, said.out.split())) < 300


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION"])
@pytest.mark.usefixtures("vllm")
def test_an_otlp_variable_that_cannot_be_used_is_a_warning(run: Doctor, variable: str) -> None:
    said = run(OTEL_METRICS_EXPORTER="otlp", **{variable: "zip"})
    assert f"warning {variable}=zip is no" in said.words


@pytest.mark.parametrize("error", [SystemExit(3), type("Mute", (Exception,), {"__str__": None, "__repr__": None})()])
def test_a_fault_of_any_kind(run: Doctor, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(doctor, "diagnose", fail)
    said = run()
    assert said.status == 1
    assert said.err.startswith(f"kvcache-otel doctor: failed itself: {type(error).__name__}")


def test_a_fault_of_the_doctor_itself(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(doctor, "diagnose", fail)
    said = run()
    assert (said.status, said.out) == (1, "")
    assert said.err == "kvcache-otel doctor: failed itself: RuntimeError: unforeseen\n"


def test_interrupted(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "diagnose", interrupt)
    assert run().status == 130


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), ([], 2), (["doctor", "--engine", "other"], 2)])
def test_the_command_line(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(arguments)
    assert ended.value.code == status
    said = capsys.readouterr()
    assert (__version__ in said.out) == (status == 0)


@pytest.mark.parametrize(
    ("port", "protocol", "other"),
    [(4318, "grpc", "http/protobuf"), (4317, "http/protobuf", "grpc"), (4318, "", "http")],
)
def test_the_port_of_the_other_protocol_is_a_warning(run: Doctor, port: int, protocol: str, other: str) -> None:
    said = run(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://localhost:{port}", OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    assert f"port {port} is where collectors take the protocol {other}" in said.words
    right = "http/protobuf" if port == 4318 else "grpc"
    said = run(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://localhost:{port}", OTEL_EXPORTER_OTLP_PROTOCOL=right)
    assert "is where collectors take" not in said.words
