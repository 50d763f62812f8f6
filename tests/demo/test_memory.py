"""Memory of every kind keeps what is written, and pools give out each page once."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvcache_otel.demo import memory
from kvcache_otel.demo.memory import FileMemory, Lane, Memory, Pool, make_memory
from tests.conftest import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PAGES, BYTES = 4, 16


def keeps(first: Memory, second: Memory) -> None:
    for page in range(PAGES):
        first.write(page, bytes([page + 1]) * BYTES)
    second.copy([3, 0], first, [1, 2])
    assert [second.read(page)[:1] for page in range(PAGES)] == [b"\3", b"\0", b"\0", b"\2"]
    assert first.read(3) == b"\4" * BYTES


def test_what_is_written_is_read_and_copied(tmp_path: Path) -> None:
    for kind in ("plain", "numpy"):
        for other in ("plain", "numpy"):
            keeps(*(make_memory(one, PAGES, BYTES, on_device=False) for one in (kind, other)))
        file = FileMemory(PAGES, BYTES, tmp_path)
        for page in range(PAGES):
            file.write(page, bytes(BYTES))
        keeps(make_memory(kind, PAGES, BYTES, on_device=False), file)
        keeps(file, make_memory(kind, PAGES, BYTES, on_device=False))
        assert list(tmp_path.iterdir()) == []  # It has no name.
        file.close()


@pytest.mark.engine
def test_so_it_is_in_tensors(tmp_path: Path) -> None:
    require("torch")
    for kind in ("plain", "torch"):
        keeps(make_memory("torch", PAGES, BYTES, on_device=True), make_memory(kind, PAGES, BYTES, on_device=False))
        keeps(make_memory(kind, PAGES, BYTES, on_device=False), make_memory("torch", PAGES, BYTES, on_device=True))
    keeps(make_memory("torch", PAGES, BYTES, on_device=False), make_memory("torch", PAGES, BYTES, on_device=False))


@pytest.mark.parametrize(
    ("installed", "kind"), [((), "plain"), (("numpy",), "numpy"), (("torch", "numpy"), "torch"), (("torch",), "torch")]
)
def test_the_first_that_is_installed_is_taken(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], kind: str
) -> None:
    monkeypatch.setattr(memory, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(memory, "TorchMemory", lambda *_, **__: FakeTensors())
    assert make_memory("auto", PAGES, BYTES, on_device=False).kind == kind


class FakeTensors:
    """Stands in for memory of torch, which is not installed here."""

    kind = "torch"


WITH_NEITHER = """
import sys
sys.modules.update(dict.fromkeys(("torch", "numpy", "zmq", "msgspec", "rich")))  # As if they were not installed.
from kvcache_otel.demo.books import recount
from kvcache_otel.demo.cache import TieredCache
from kvcache_otel.demo.config import Config
from kvcache_otel.demo.instrument import instrument
from kvcache_otel.demo.workload import Shape, Workload
cache = TieredCache(Config(device_tokens=1024, host_tokens=2048, storage_thread=False))
handle = instrument(cache)
workload = Workload(cache, Shape(users=8))
for _ in range(100):
    workload.step()
assert recount(cache).held["disk"] > 0
assert handle.missing == (), handle.report()
print(cache.device.memory.kind, workload.turns > 0)
cache.close()
"""

NOTHING_IMPORTED = """
import sys
import kvcache_otel.demo.cache, kvcache_otel.demo.workload, kvcache_otel.demo.publisher, kvcache_otel.demo.instrument
print(sorted({"torch", "numpy", "zmq", "msgspec", "rich", "opentelemetry.sdk"} & set(sys.modules)))
"""


@pytest.mark.parametrize(("program", "says"), [(WITH_NEITHER, "plain True"), (NOTHING_IMPORTED, "[]")])
def test_what_is_not_installed_is_not_needed(program: str, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.returncode) == (says, 0), done.stderr


def test_a_pool_gives_each_page_once() -> None:
    pool = Pool(3, Memory(3, BYTES))
    first, second = pool.take(2), pool.take(1)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2]
    assert pool.take(1) is None
    assert pool.take(0) == []
    pool.give(first)
    assert (pool.free, pool.take(3), pool.free) == (2, None, 2)


class FakeCuda:
    """Stands in for `torch.cuda` and its streams: writes down what waits for what, and what is put on which."""

    def __init__(self, name: str = "computing", said: list[str] | None = None) -> None:
        self.name = name
        self.said: list[str] = [] if said is None else said
        self.on = self

    def current_stream(self) -> FakeCuda:
        return self.on

    def wait_stream(self, other: FakeCuda) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.said.append(f"somebody waits for {self.name}")

    @contextmanager
    def stream(self, other: FakeCuda) -> Iterator[None]:
        self.on = other
        yield
        self.on = self


def test_copies_on_a_stream_wait_for_what_is_computed_and_the_other_way_round() -> None:
    cuda = FakeCuda()
    lane = Lane(Memory(1, BYTES))
    assert lane.stream is None
    lane.wait()  # For nothing.
    lane.stream, lane._cuda = FakeCuda("copying", cuda.said), cuda

    class Copied(Memory):
        def copy(self, pages: Sequence[int], source: Memory, sources: Sequence[int]) -> None:
            cuda.said.append(f"{cuda.current_stream().name} copies {list(sources)} to {list(pages)}")

    lane.copy(Pool(2, Copied(2, BYTES)), [1], Pool(2, Memory(2, BYTES)), [0])
    lane.wait()
    assert cuda.said == [
        "copying waits for computing",
        "copying copies [0] to [1]",
        "computing waits for copying",
        "somebody waits for copying",
    ]
