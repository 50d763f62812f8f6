"""What `benchmarks/gpu_timing.py` measures and how it judges, on a made-up device with one fault after the other."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.gpu_claims import Alone, Figures, claims, table
from benchmarks.gpu_device import TO_DEVICE, TO_HOST, WAYS, Torch
from benchmarks.gpu_timing import EARLY_ROUNDS, Benchmark, main

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SIZE, ROUNDS = 2**28, 8

CALL_S, RECORD_S, WAKE_S, LOOK_S = 1e-6, 2e-6, 8e-6, 1e-3
"""What it costs the made-up host to launch a copy, to record an event, to be woken, and to look again."""


class FakeClock:
    """The made-up host's clock, which goes on when the benchmark's thread calls something, and not by itself."""

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():  # The harvester has a processor of its own.
            self.now += seconds


class FakeStream:
    """Stands in for a stream: what is put on it is done in order, at the made-up clock's pace."""

    def __init__(self, device: FakeGpu) -> None:
        self.device_of = device
        self.busy_until = 0.0

    def put(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.device_of.host.now) + seconds

    def synchronize(self) -> None:
        host = self.device_of.host
        host.now = max(host.now, self.busy_until) + WAKE_S


class FakeEvent:
    """Stands in for a timed event on such a stream."""

    def __init__(self, device: FakeGpu) -> None:
        self.device = device
        self.at = math.inf

    def record(self, stream: FakeStream) -> None:
        self.device.host.spend(RECORD_S)
        stream.put(0.0)
        self.at = stream.busy_until

    def query(self) -> bool:
        self.device.host.spend(LOOK_S)
        return self.at <= self.device.host.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1000


class FakeGpu:
    """Stands in for a GPU with two copy engines, at 50 GB/s each, and nothing wrong with it."""

    name = "made-up GPU"
    EVENT: type[FakeEvent] = FakeEvent

    def __init__(self) -> None:
        self.host = FakeClock()
        self.streams: list[FakeStream] = []

    def clock(self) -> float:
        return self.host.now

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def make_event(self) -> FakeEvent:
        return self.EVENT(self)

    def copy(self, way: str, stream: FakeStream, size: int) -> None:
        self.host.spend(CALL_S)
        stream.put(size / 50e9)

    def arrives(self, way: str) -> bool:
        return True


def measure(device: FakeGpu) -> Figures:
    return Benchmark(device, SIZE, ROUNDS).run()


def missed(figures: Figures) -> list[str]:
    return [claim.what for claim in claims(figures) if not claim.held]


def test_a_device_with_nothing_wrong_holds_every_claim() -> None:
    figures = measure(FakeGpu())
    assert missed(figures) == []
    seconds = SIZE / 50e9
    assert [alone.way for alone in figures.alone] == [TO_HOST, TO_DEVICE]
    for alone in figures.alone:
        assert len(alone.device) == len(alone.synchronised) == len(alone.launch) == ROUNDS
        assert alone.device == pytest.approx([seconds + CALL_S] * ROUNDS)
        assert alone.synchronised == pytest.approx([seconds + CALL_S + WAKE_S] * ROUNDS)
        assert alone.launch == pytest.approx([CALL_S] * ROUNDS)
    for busy in figures.busy:
        assert busy.blocked == pytest.approx([2 * RECORD_S] * ROUNDS)
    assert [together.way for together in figures.together] == list(WAYS)
    assert figures.together[0].own == pytest.approx([seconds] * ROUNDS)
    assert figures.together[1].own == pytest.approx([seconds / 4] * ROUNDS)
    assert (figures.overlapped, figures.rounds, figures.early) == (ROUNDS, ROUNDS, 0)
    assert figures.looks > 50
    # Of each direction one for warming up, so many alone, behind others and beside others; three that are looked at.
    assert figures.copies == figures.samples == 2 * (3 * ROUNDS + 1) + EARLY_ROUNDS


class WrongByATenth(FakeEvent):
    def elapsed_time(self, end: FakeEvent) -> float:
        return super().elapsed_time(end) * 1.1


class TooEarly(FakeEvent):
    def query(self) -> bool:
        return True


class Slow(FakeEvent):
    def record(self, stream: FakeStream) -> None:
        self.device.host.spend(15e-6)
        super().record(stream)


class Synchronising(FakeEvent):
    def record(self, stream: FakeStream) -> None:
        super().record(stream)
        stream.synchronize()


class Untimed(FakeEvent):
    def elapsed_time(self, end: FakeEvent) -> float:
        raise RuntimeError("made without timing")


class Mixed(FakeEvent):
    """One that tells the time to whichever event was recorded last, on whatever stream."""

    last: FakeEvent

    def record(self, stream: FakeStream) -> None:
        super().record(stream)
        Mixed.last = self

    def elapsed_time(self, end: FakeEvent) -> float:
        return super().elapsed_time(Mixed.last)


BESIDE = "beside another stream: worst copy"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (WrongByATenth, ["device time", "device time", BESIDE, BESIDE]),
        (TooEarly, ["no sample before"]),
        (Slow, ["blocked", "blocked"]),
        (Untimed, ["device time", "device time", BESIDE, BESIDE, "has a sample"]),
        (Mixed, [BESIDE]),
    ],
)
def test_an_event_with_a_fault_misses_the_claims_that_are_about_it(event: type[FakeEvent], words: list[str]) -> None:
    device = FakeGpu()
    device.EVENT = event
    found = missed(measure(device))
    assert len(found) == len(words), found
    for what, word in zip(found, words, strict=True):
        assert word in what


def test_an_event_that_waits_for_the_device_blocks_the_thread_and_leaves_nothing_to_be_looked_at() -> None:
    device = FakeGpu()
    device.EVENT = Synchronising
    figures = measure(device)
    assert figures.looks == 0
    assert [what.rpartition(": ")[2] for what in missed(figures)][:2] == [
        "the engine's thread is blocked, a transfer"
    ] * 2
    assert "no sample before its event is done" in missed(figures)


def test_a_device_that_copies_one_way_at_a_time_shows_nothing_of_two_streams() -> None:
    class OneEngine(FakeGpu):
        def copy(self, way: str, stream: FakeStream, size: int) -> None:
            stream.busy_until = max(each.busy_until for each in self.streams)
            super().copy(way, stream, size)

    assert "these streams copy at the same time" in missed(measure(OneEngine()))


def test_a_copy_that_moves_nothing_is_no_copy() -> None:
    class Idle(FakeGpu):
        def arrives(self, way: str) -> bool:
            return way != TO_DEVICE

    assert missed(measure(Idle())) == [f"{TO_DEVICE}: its bytes arrive"]


def test_what_was_not_seen_at_all_is_not_held() -> None:
    empty = Figures("none", SIZE, [], [Alone(TO_HOST, [], [], [])], [], 0, 0, [], 0, 0, 0, 0)
    judged = list(claims(empty))
    assert len(judged) == 5
    assert not any(claim.held for claim in judged)
    assert all("missed" in line for line in list(table(empty, judged))[-5:])


def test_the_table_names_the_device_and_shows_the_launch_beside_the_copy() -> None:
    figures = measure(FakeGpu())
    judged = list(claims(figures))
    lines = list(table(figures, judged))
    assert lines[0].startswith("made-up GPU, Python")
    assert lines[1].startswith("256 MiB a copy")
    (row,) = (line for line in lines if line.startswith(TO_HOST) and "GB/s" not in line and ":" not in line)
    assert row.split()[3:] == ["5.370", "ms", "5.378", "ms", "0.001", "ms", "50.0"]
    assert len(lines) == 8 + len(judged)
    assert not any("missed" in line for line in lines)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("held", [True, False])
def test_the_exit_status_is_that_of_the_claims(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], held: bool
) -> None:
    device = FakeGpu()
    device.EVENT = FakeEvent if held else Slow
    monkeypatch.setattr("benchmarks.gpu_timing.find", lambda: object())
    monkeypatch.setattr("benchmarks.gpu_timing.Torch", lambda torch, size: device)
    assert main(["--rounds", "2"]) == (0 if held else 1)
    assert ("missed" in capsys.readouterr().out) is not held


class FakeTensor:
    """Stands in for a tensor: of its bytes it knows whether they are the same as another's.

    Attributes:
        bytes: How many.
        content: What they are; a slice shares it.
    """

    made = 0

    def __init__(self, size: int, where: str, content: list[int] | None = None) -> None:
        self.size, self.where = size, where
        self.content = [0] if content is None else content

    def __getitem__(self, part: slice) -> FakeTensor:
        assert (part.start, part.step) == (None, None)
        return FakeTensor(part.stop, self.where, self.content)

    def random_(self) -> None:
        FakeTensor.made += 1
        self.content[0] = FakeTensor.made

    def zero_(self) -> None:
        self.content[0] = 0

    def cpu(self) -> FakeTensor:
        return self

    def numel(self) -> int:
        return self.size


class FakeTorch(types.ModuleType):
    """Stands in for torch with a GPU, as far as the benchmark and the library use it.

    Attributes:
        copied: The sizes and directions of all copies.
    """

    uint8 = "uint8"
    __version__ = "2.13.0"

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__("torch")
        self.gpu = gpu
        self.version = types.SimpleNamespace(hip=None, cuda="13.0")
        self.copied: list[tuple[int, str, str]] = []
        self.current: FakeStream | None = None
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            get_device_name=lambda: "made-up GPU",
            Stream=self.new_stream,
            Event=self.new_event,
            stream=self.on_stream,
            synchronize=lambda: None,
        )
        torch = self

        class Tensor(FakeTensor):
            def __getitem__(self, part: slice) -> Tensor:
                return Tensor(super().__getitem__(part).size, self.where, self.content)

            def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
                assert non_blocking
                assert source.size == self.size
                assert torch.current is not None, "a copy on the usual stream"
                torch.copied.append((self.size, source.where, self.where))
                gpu.copy("", torch.current, self.size)
                self.content[0] = source.content[0]

        self.tensor = Tensor

    def new_stream(self) -> FakeStream:
        stream = self.gpu.stream()
        stream.device = types.SimpleNamespace(type="cuda", index=0)  # type: ignore[attr-defined]
        return stream

    def new_event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return self.gpu.event()

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty(self, size: int, *, dtype: str, device: str = "cpu", pin_memory: bool = False) -> FakeTensor:
        assert dtype == self.uint8
        assert pin_memory is (device == "cpu")
        return self.tensor(size, device)

    def equal(self, one: FakeTensor, other: FakeTensor) -> bool:
        return one.content == other.content


def test_with_torch_it_copies_both_ways_and_the_library_makes_events_of_torchs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = FakeGpu()
    torch = FakeTorch(gpu)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(Torch, "clock", staticmethod(gpu.clock))
    assert main(["--mib", "64", "--rounds", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("made-up GPU, CUDA 13.0, torch 2.13.0, Python 3.")
    assert lines[1].startswith("64 MiB a copy")
    assert {(source, destination) for _, source, destination in torch.copied} == {("cuda", "cpu"), ("cpu", "cuda")}
    assert {size for size, _, _ in torch.copied} == {2**26, 2**24}


def test_with_torch_bytes_that_do_not_arrive_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(FakeGpu())
    device = Torch(torch, 2**20)
    assert all(device.arrives(way) for way in WAYS)
    monkeypatch.setattr(torch.tensor, "copy_", lambda *_, **__: None)
    assert not any(device.arrives(way) for way in WAYS)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "no GPU: torch cannot be imported"),
        ("raise OSError('libcuda.so.1: cannot open shared object file')", "no GPU: torch cannot be imported"),
        (
            "__version__ = '2.13.0+cpu'\nclass cuda:\n    is_available = staticmethod(lambda: False)",
            "no GPU: torch 2.13.0+cpu sees none",
        ),
    ],
)
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path, module: str | None, words: str) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError('No module named torch')" if module is None else module
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "benchmarks.gpu_timing"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(words)
    assert len(ended.stdout.splitlines()) == 1


@pytest.mark.parametrize("argument", ["0", "-1", "x"])
def test_a_size_that_is_none_is_one_clear_line(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"--mib={argument}"])
    assert ended.value.code == 2
    assert f"'{argument}'" in capsys.readouterr().err
