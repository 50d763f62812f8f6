"""`kvcache-otel doctor MODULE:NAME` on caches that are made up here: what it finds, what it leaves, how it ends."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider

from kvcache_otel.cli import command
from kvcache_otel.cli.report import WIDTH
from kvcache_otel.engines.generic.handle import living
from kvcache_otel.instrumentation import instrumentation
from kvcache_otel.record import cells
from tests.cli.said import Said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Doctor = Callable[..., Said]

SHOP = """
import kvcache_otel as kv

BACKUP = {"write_back": kv.Backup(tokens=1, bytes=1)}


class Controller:
    blocks = 3

    def write_back(self, block):
        return block


class Tree:
    def evict(self, count):
        return count


def make(**options):
    print("noise")
    controller = Controller()
    kv.instrument_controller(controller, tiers={"device": "kv", "host": ("kv", "swa")}, methods=BACKUP, **options)
    return controller


def make_both():
    controller, tree = Controller(), Tree()
    handle = kv.instrument_controller(
        controller,
        tiers={"device": "kv", "host": "kv"},
        methods={**BACKUP, "gone": kv.Eviction(tokens=1)},
        gauges=kv.Gauges(resident={"device": "blocks", "host": "absent"}),
        cache="Shop",
        rank=kv.Rank(tp=1),
    )
    kv.instrument_tree_core(tree, beside=handle, methods={"evict": kv.Eviction(tokens=1)})
    return controller, tree


def make_swapped():
    controller = make()
    controller.write_back = lambda block: block
    return controller


def only_the_handle():
    return kv.instrument_controller(Controller(), tiers={"device": "kv"}, methods={"write_back": kv.Eviction(tokens=1)})


def undeclared():
    return kv.instrument_controller(Controller(), tiers={"gpu": "kv"})


def nothing_fits():
    controller = Controller()
    kv.instrument_controller(controller, tiers={"device": "kv"}, methods={"gone": kv.Eviction(tokens=1)})
    return controller


def nothing_to_wrap():
    controller = Controller()
    kv.instrument_controller(controller, tiers={"device": "kv"}, methods={"blocks": kv.Eviction(tokens=1)})
    return controller


def with_arguments(size): ...


async def later(): ...


def by_hand():
    return kv.transfers("device", "host", cache="Hand")


def plain():
    return Controller()


def ends():
    raise SystemExit(4)


def fails():
    raise RuntimeError("no\\nroom")
"""


@pytest.fixture(autouse=True)
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    for variable in list(os.environ):
        if variable.startswith(("OTEL_", "PROMETHEUS_", "COLUMNS")):
            monkeypatch.delenv(variable)
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == tmp_path:
            del sys.modules[name]
    instrumentation.detach()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the doctor in this process, exporting to the console unless something else is said."""

    def run(*arguments: str, **environ: str) -> Said:
        for name, value in (environ or {"OTEL_METRICS_EXPORTER": "console"}).items():
            monkeypatch.setenv(name, value)
        status = command.run(["doctor", *arguments])
        return Said(status, *capsys.readouterr())

    return run


def test_all_is_well(run: Doctor) -> None:
    said = run("shop:make")
    assert said.status == 0
    assert "ok cache Controller, rank tp=0 pp=0 dp=0, tiers device (kv), host (kv, swa)" in said.words
    assert "  attached   write_back  Controller.write_back" in said.out.splitlines()
    assert said.sentence == (
        "All is well: the KV caches of Controller would be measured, and exported: console every 10 s "
        "(OTEL_METRICS_EXPORTER=console)."
    )
    assert "noise" not in said.out + said.err


def test_what_is_missing_is_said_of_each_object(run: Doctor) -> None:
    said = run("shop:make_both")
    assert said.status == 0
    assert "Controller of Shop" in said.out
    assert "Tree of Shop" in said.out
    assert said.words.count("cache Shop, rank tp=1 pp=0 dp=0") == 2
    assert "warning 2 of 4 hooks and gauges are attached" in said.words
    assert "ok 1 of 1 hooks and gauges are attached" in said.words
    assert "attached blocks resident on device Controller" in said.words
    assert "MISSING gone Controller has no gone" in said.words
    assert "MISSING blocks resident on host Controller has no absent" in said.words
    assert "- what is evicted from device (hook gone) - blocks resident on host Tree of Shop" in said.words
    assert said.sentence.startswith("It works, with 1 warning and 2 missing hooks (see above): the KV caches of ")
    assert [line for line in said.out.splitlines() if len(line) > WIDTH] == []


def test_a_hook_that_calls_do_not_come_by_is_not_attached(run: Doctor) -> None:
    said = run("shop:make_swapped")
    assert said.status == 1
    assert "MISSING write_back another has been put in its place on the object itself since" in said.words
    assert "0 of 1 hooks and gauges are attached" in said.words


def test_json_tells_the_same(run: Doctor) -> None:
    told = run("--json", "shop:make_both").data
    controller, tree = told["engines"]
    hooks = {hook["name"]: (hook["target"], hook["attached"]) for hook in controller["hooks"]}
    assert hooks == {
        "write_back": ("shop:Controller.write_back", True),
        "blocks resident on device": ("shop:Controller", True),
        "gone": ("shop:Controller.gone", False),
        "blocks resident on host": ("shop:Controller", False),
    }
    assert [hook["name"] for hook in tree["hooks"]] == ["evict"]
    assert (told["status"], told["installation"]) == (0, [])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("from shop import make\ncache = make()", "made:cache"),
        ("from shop import make\ncache = make()", "made"),
        ("from shop import make\nclass Caches:\n    first = staticmethod(make)", "made:Caches.first"),
        ("import shop\nclass Cache(shop.Controller):\n    def __init__(self):\n        import kvcache_otel as kv\n"
         "        kv.instrument_controller(self, tiers={'device': 'kv', 'host': 'kv'}, methods=shop.BACKUP)",
         "made:Cache"),
        ("import shop\nclass Called(shop.Controller):\n    def __call__(self):\n        raise AssertionError\n"
         "import kvcache_otel as kv\ncache = Called()\n"
         "kv.instrument_controller(cache, tiers={'device': 'kv', 'host': 'kv'}, methods=shop.BACKUP)",
         "made:cache"),
    ],
    ids=["an object", "a module", "a static method", "a class", "an object that can be called"],
)  # fmt: skip
def test_whatever_makes_a_cache_can_be_named(run: Doctor, shop: Path, source: str, target: str) -> None:
    (shop / "made.py").write_text(source)
    importlib.invalidate_caches()
    said = run(target)
    assert said.status == 0
    assert "ok 1 of 1 hooks and gauges are attached" in said.words


READS = """
import shop
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
cache = shop.make(meter_provider=MeterProvider([reader]))
print(reader.get_metrics_data().resource_metrics)
"""
"""What the tutorial is, pasted into one file: it makes a cache and reads its metrics."""


@pytest.mark.parametrize(
    ("target", "why", "remedy"),
    [
        ("absent:make", "there is no module absent", "in the folder, of the program"),
        ("shop:absent", "shop has no absent", "name what makes the cache"),
        ("shop:make.absent", "shop has no make.absent", "name what makes the cache"),
        ("shop:", "'shop:' names no module", "mypackage.module:make_cache"),
        (":make", "':make' names no module", "mypackage.module:make_cache"),
        ("", "'' names no module", "mypackage.module:make_cache"),
        ("shop/make", "'shop/make' names no module", "mypackage.module:make_cache"),
        ("shop.py", "shop.py is a file", "name its module, as in kvcache-otel doctor shop"),
        ("shop.py:make", "shop.py is a file", "kvcache-otel doctor shop:make"),
        ("{folder}/shop.py", "shop.py is a file", "in its folder, as in kvcache-otel doctor shop"),
        ("absent.py", "there is no module absent", "in the folder, of the program"),
        ("broken", "importing broken fails: ZeroDivisionError: division by zero", "if __name__"),
        ("reads", "importing reads fails: AttributeError: 'NoneType' object has no", "exports nothing meanwhile"),
        ("shop:with_arguments", "shop:with_arguments needs arguments: missing a required argument: 'size'", "none"),
        ("shop:later", "it is a coroutine", "name a function that takes none"),
        ("shop:ends", "shop:ends fails: SystemExit: 4", ""),
        ("shop:fails", "shop:fails fails: RuntimeError: no room", ""),
        ("shop:undeclared", "shop:undeclared fails: ValueError: kvcache.tier has no 'gpu'", ""),
        ("shop:plain", "nothing of shop:plain is instrumented", "instrument_controller"),
        (
            "shop",
            "nothing of shop is instrumented",
            "name what makes it, as in shop:NAME; or call kvcache_otel.instrum",
        ),
        ("shop:BACKUP", "nothing of shop:BACKUP is instrumented", "instrument_controller"),
        ("shop:only_the_handle", "its object is gone already", "return the object"),
        ("shop:nothing_fits", "nothing of Controller would be measured: Controller has no gone", "methods="),
        ("shop:nothing_to_wrap", "nothing of Controller would be measured: Controller.blocks is no method", "methods="),
    ],
)
def test_what_keeps_a_cache_from_being_measured_is_one_clear_line(
    run: Doctor, shop: Path, target: str, why: str, remedy: str
) -> None:
    (shop / "broken.py").write_text("1 / 0\n")
    (shop / "reads.py").write_text(READS)
    importlib.invalidate_caches()
    said = run(target.format(folder=shop))
    assert said.status == 1
    assert said.sentence.startswith("Nothing would be measured: ")
    assert why in said.sentence
    assert remedy in said.sentence
    assert said.out.count("FAILURE") == 1
    assert "Traceback" not in said.out + said.err


OTHERS = """
import kvcache_otel as kv
import shop

EVICTS = {"write_back": kv.Eviction(tokens=1)}
cache = shop.make(cache="First")
handle = kv.instrument_controller(shop.Controller(), tiers={"device": "kv"}, methods=EVICTS, cache="Gone")
bare = shop.Controller()
copies = kv.transfers("device", "host", cache="Copies")


class Engine:
    def __init__(self):
        self.parts = {"caches": [shop.make(cache="Inner")]}


engine = Engine()


def make_bare():
    return shop.Controller()


def get():
    return cache


def make_another():
    return shop.make(cache="Another")
"""


@pytest.mark.parametrize(
    ("target", "caches"),
    [
        ("others", ["First", "Inner", "Gone", "Copies"]),
        ("others:cache", ["First"]),
        ("others:bare", []),
        ("others:make_bare", []),
        ("others:get", ["First"]),
        ("others:engine", ["Inner"]),
        ("others:make_another", ["Another"]),
        ("others:copies", ["Copies"]),
    ],
)
def test_only_what_was_asked_for_is_looked_at(run: Doctor, shop: Path, target: str, caches: list[str]) -> None:
    (shop / "others.py").write_text(OTHERS)
    importlib.invalidate_caches()
    said = run(target)
    lines = [line for line in said.out.splitlines() if line and not line.startswith(" ")]
    titles = dict.fromkeys(line.split()[-1] for line in lines)
    assert [title for title in titles if title in {"First", "Inner", "Gone", "Copies", "Another"}] == caches
    assert said.status == (0 if caches else 1)
    assert (f"nothing of {target} is instrumented" in said.words) is not bool(caches)


def test_transfers_that_are_told_by_hand_are_noted(run: Doctor) -> None:
    said = run("shop:by_hand")
    assert said.status == 0
    assert "note no object of it is there: its transfers are told by hand" in said.words
    assert "the KV caches of Hand would be measured" in said.sentence


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"OTEL_METRICS_EXPORTER": "none"}, "OTEL_METRICS_EXPORTER=none"),
        ({"OTEL_SERVICE_NAME": "x"}, "nothing is exported: set OTEL_METRICS_EXPORTER"),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_METRICS_EXPORTER": "console"}, "OTEL_SDK_DISABLED=true"),
    ],
)
def test_what_the_environment_forbids(run: Doctor, environ: dict[str, str], why: str) -> None:
    said = run("shop:make", **environ)
    assert said.status == 1
    assert why in said.sentence


def test_a_provider_of_the_programs_own_needs_no_variables(run: Doctor, shop: Path) -> None:
    (shop / "made.py").write_text(
        "from opentelemetry.sdk.metrics import MeterProvider\nimport shop\n"
        "def make():\n    return shop.make(meter_provider=MeterProvider())\n"
    )
    importlib.invalidate_caches()
    said = run("made:make", OTEL_METRICS_EXPORTER="none")
    assert said.status == 0
    assert said.sentence.endswith("exported: by the MeterProvider that the program has.")
    assert run("made:make", OTEL_SDK_DISABLED="true").status == 1


def test_nothing_is_exported_or_left(run: Doctor, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shop / "kept.py").write_text("from shop import make\ncache = make()")
    importlib.invalidate_caches()
    made: list[Any] = []
    monkeypatch.setattr(MeterProvider, "__init__", lambda *_, **__: made.append(1))
    threads = set(threading.enumerate())
    said = run("kept", OTEL_METRICS_EXPORTER="prometheus,otlp")
    assert said.status == 0
    assert made == []
    assert vars(sys.modules["kept"].cache) == {}
    assert set(threading.enumerate()) == threads
    assert living() == []
    assert instrumentation.runtime is None


def test_a_free_threaded_python_is_a_failure(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "EXACT", False)
    said = run("shop:make")
    assert said.status == 1
    assert "this Python runs without a global lock" in said.sentence


def test_a_cache_and_an_engine_are_not_asked_for_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(["doctor", "shop:make", "--engine", "vllm"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_what_the_program_leaves_running_neither_holds_the_doctor_up_nor_speaks_after_it(shop: Path) -> None:
    (shop / "lasting.py").write_text(
        "import atexit, threading, time\nfrom shop import make\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\natexit.register(print, 'late')\n"
    )
    environ = {**os.environ, "OTEL_METRICS_EXPORTER": "console"}
    command_line = [sys.executable, "-c", "import sys; from kvcache_otel.cli import main; sys.exit(main())"]
    command_line += ["doctor", "--json", "lasting:make"]
    ended = subprocess.run(command_line, env=environ, cwd=shop, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, json.loads(ended.stdout)["status"]) == (0, 0)


def test_the_installed_command_finds_what_is_in_the_folder(shop: Path) -> None:
    """A script's own folder is first on its path, and not the one that it was called in."""
    script = Path(sys.executable).with_name("kvcache-otel")
    environ = {**os.environ, "OTEL_METRICS_EXPORTER": "console"}
    command_line = [sys.executable, str(script), "doctor", "shop:make"]
    ended = subprocess.run(command_line, env=environ, cwd=shop, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "All is well: the KV caches of Controller would be measured" in " ".join(ended.stdout.split())
