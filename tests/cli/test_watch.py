"""`kvcache-otel watch` as a process: what it prints, how it ends, and what real receivers get from it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import zmq
from rich.cells import cell_len

from kvcache_otel.cli import command, watch_view
from kvcache_otel.cli.fit import SHORTEST_NAME, fit, shortened
from kvcache_otel.cli.repeated import FIRST
from kvcache_otel.cli.watch_output import UNREAD_SECONDS
from kvcache_otel.events.counts import CELLS
from kvcache_otel.events.index import BlockIndex, series
from kvcache_otel.events.watch import Watch
from kvcache_otel.events.worker import OTHER
from kvcache_otel.identity import Identity
from kvcache_otel.record.recorder import Recorder
from tests.conftest import require
from tests.events.fake_peer import tcp_server
from tests.events.fake_publisher import FakePublisher, frame
from tests.events.payloads import batch, removed, stored
from tests.support.otlp_receiver import otlp_receiver
from tests.support.processes import free_port, wait_until
from tests.support.prometheus_server import prometheus_server

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

PROGRAM = [sys.executable, "-m", "kvcache_otel"]


SOON = 8.0
"""Seconds in which a process ends that waits for nothing, on a machine that has much else to do. What it must not wait
for would take ten and more: a collector that does not answer, or a reader who never reads."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publisher(context: zmq.Context[zmq.Socket[bytes]]) -> FakePublisher:
    return FakePublisher(context)


def environ(**more: str) -> dict[str, str]:
    """The environment without what decides about exports, and with what a test wants."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "PROMETHEUS_"))}
    return {**kept, "OTEL_METRICS_EXPORTER": "none", "COLUMNS": "200", "LINES": "40", "TERM": "xterm", **more}


class Running(NamedTuple):
    """A watch in a process of its own.

    Attributes:
        process: The process.
        out: The lines of its output so far.
        err: The lines of its log so far.
    """

    process: subprocess.Popen[str]
    out: list[str]
    err: list[str]

    def says(self, pattern: str) -> re.Match[str]:
        """Returns the first match among its lines, as soon as there is one."""
        wait_until(lambda: self._find(pattern), what=f"{pattern} in {self.out} {self.err}")
        found = self._find(pattern)
        assert found is not None
        return found

    def _find(self, pattern: str) -> re.Match[str] | None:
        return next((found for line in (*self.out, *self.err) if (found := re.search(pattern, line))), None)

    def end(self, number: int) -> float:
        """Sends it a signal, and returns how many seconds it took to end with status 0."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(20) == 0
        return time.monotonic() - began


@contextmanager
def watching(*arguments: str, **variables: str) -> Generator[Running]:
    process = subprocess.Popen(
        [*PROGRAM, "watch", *arguments],
        env=environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Running(process, [], [])
    readers = [
        threading.Thread(target=lambda stream=stream, lines=lines: lines.extend(iter(stream.readline, "")))
        for stream, lines in ((process.stdout, running.out), (process.stderr, running.err))
        if stream is not None
    ]
    for reader in readers:
        reader.start()
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()


def subscribed(publisher: FakePublisher) -> None:
    def joined() -> bool:
        publisher.serve()
        return bool(publisher.subscriptions)

    wait_until(joined)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs the command in this process."""
    status = 0
    try:
        status = command.run(["watch", *arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    return status, *capsys.readouterr()


# -- what it prints ----------------------------------------------------------------------------------------------------


def test_once_is_a_table(publisher: FakePublisher) -> None:
    publisher.rank = 10
    with watching("--once", "--seconds", "3", f"a={publisher.endpoint}", f"silent=tcp://127.0.0.1:{free_port()}") as it:
        subscribed(publisher)
        for number in range(1500):
            publisher.publish(stored([number]), stored([number], "CPU"), drop=number % 100 == 50)
        publisher.publish(removed([0, 1]), rank=9)
        publisher.send(b"", frame(2**64 - 1), b"")
        assert it.process.wait(20) == 0
    assert not [line for line in it.err if " INFO " in line]
    head, second, first, silent = (line.split() for line in it.out)
    if first[1] == "9":  # Ranks in the order of their numbers.
        first, second = second, first
    columns = "worker rank engine state device host events lost recovered duplicate resets failures age"
    assert head == columns.split()
    assert it.out[1].split()[1] == "9"
    assert first[:-2] == ["a", "10", "vllm", "-", "1,485", "1,485", "2,970", "15", "0", "0", "0", "-"]
    assert second[:6] == ["a", "9", "vllm", "-", "0", "-"]
    assert second[-3] == "1", "a failure is the worker's, and in its first row"
    assert float(first[-2]) < 60
    assert silent == ["silent", "-", "-", "down", "-", "-", "-", "-", "-", "-", "-", "0", "-"]
    assert {len(line.rstrip()) for line in it.out[:3]} == {len(it.out[0].rstrip())}
    assert any("'silent' cannot be reached" in line for line in it.err)


def test_lines_in_a_pipe(publisher: FakePublisher) -> None:
    with watching("--every", "0.1", f"a={publisher.endpoint}") as it:
        it.says("^worker=a state=silent failures=0$")
        subscribed(publisher)
        publisher.publish(stored([1, 2, 3]))
        it.says(
            r"^worker=a rank=0 engine=vllm device=3 events=1 lost=0 recovered=0 duplicate=0 resets=0 failures=0 "
            r"age=\d+\.\d$"
        )
        publisher.publish(stored([4], "DISK"))
        it.says("^worker=a rank=0 engine=vllm device=3 disk=1 events=2 ")
        assert it.end(signal.SIGINT) < SOON


def test_a_reader_who_has_read_enough_ends_it(publisher: FakePublisher) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "watch", "--every", "0.1", f"a={publisher.endpoint}"],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert re.match("worker=a (state=silent|state=down) failures=0$", process.stdout.readline())
    process.stdout.close()
    assert process.wait(20) == 1
    assert process.stderr is not None
    err = process.stderr.read()
    assert "Traceback" not in err
    assert "whoever read the lines of watch is gone" in err
    process.stderr.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe's size can be set on Linux alone")
def test_a_reader_who_does_not_read_holds_nothing_up(publisher: FakePublisher, tmp_path: Path) -> None:
    log = tmp_path / "log"
    reading, writing = os.pipe()
    os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) - 1))
    with log.open("w") as err:
        process = subprocess.Popen(
            [*PROGRAM, "watch", "--every", "0.01", f"a={publisher.endpoint}"], env=environ(), stdout=writing, stderr=err
        )
    os.close(writing)
    try:
        subscribed(publisher)
        wait_until(lambda: "nobody reads the lines of watch" in log.read_text())
        assert len(re.findall("nobody reads", log.read_text())) == 1
        publisher.publish(stored([1, 2, 3]))
        publisher.close()
        wait_until(lambda: "'a' is disconnected" in log.read_text())
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - began < SOON
        assert "Traceback" not in log.read_text()
        assert "released, with 3 blocks" in log.read_text()
    finally:
        process.kill()
        process.wait()
        os.close(reading)


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe's size can be set on Linux alone")
def test_a_log_that_nobody_reads_holds_nothing_up(publisher: FakePublisher) -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) - 1))
    process = subprocess.Popen(
        [*PROGRAM, "watch", "--every", "0.1", f"a={publisher.endpoint}"], env=environ(), stdout=writing, stderr=writing
    )
    os.close(writing)
    try:
        subscribed(publisher)
        publisher.publish(stored([1, 2, 3]))
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = os.read(reading, 65536)
        assert b"released" not in log
    finally:
        process.kill()
        process.wait()
        os.close(reading)


def test_thousands_of_lines_in_the_same_words_are_few(tmp_path: Path) -> None:
    file = tmp_path / "sources"
    file.write_text("".join(f"s{number}=tcp://127.0.0.1:1?topic=t{number}\n" for number in range(200)))
    with watching("--sources", str(file)) as it:
        it.says("more lines like this: source 's.*' cannot be reached at ")
        assert it.end(signal.SIGTERM) < SOON
    assert len([line for line in it.err if "cannot be reached" in line]) == FIRST + 1
    assert len([line for line in it.err if "released" in line]) == FIRST + 1
    assert re.search(f"{200 - FIRST} more lines like this: worker 's\\d+' released, with 0 blocks", "".join(it.err))


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe's size can be set on Linux alone")
@pytest.mark.parametrize("told", [False, True], ids=["for seconds", "until a signal"])
def test_a_table_that_nobody_reads_is_given_up(publisher: FakePublisher, told: bool) -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) - 1))
    process = subprocess.Popen(
        [*PROGRAM, "watch", "--once", "--seconds", "1", f"a={publisher.endpoint}"],
        env=environ(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    try:
        subscribed(publisher)
        time.sleep(2.5)
        assert process.poll() is None, "somebody may still read it"
        if told:
            process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert process.returncode == (0 if told else 1)
        if told:
            assert time.monotonic() - began < UNREAD_SECONDS - 3
        else:
            assert "standard output cannot be written: nobody has read it for 10 s" in err.splitlines()[-1]
        assert "Traceback" not in err
    finally:
        process.kill()
        process.wait()
        os.close(reading)


def test_a_long_table_is_whole_however_slowly_it_is_read(tmp_path: Path) -> None:
    names = [f"a-source-with-a-name-that-makes-the-table-long-{number}" for number in range(1500)]
    file = tmp_path / "sources"
    file.write_text("".join(f"{name}=tcp://127.0.0.1:1\n" for name in names))
    process = subprocess.Popen(
        [*PROGRAM, "watch", "--once", "--seconds", "0.5", "--sources", str(file)],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process, process.stdout:
        time.sleep(4)
        read = process.stdout.read(100)
        time.sleep(2)
        read += process.stdout.read()
    head, *found = read.decode().splitlines()
    assert head.split()[:2] == ["worker", "rank"]
    assert sorted(line.split()[0] for line in found) == sorted(names)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is nothing that is always full")
@pytest.mark.parametrize("arguments", [("--once", "--seconds", "1"), ("--every", "0.1")])
def test_what_cannot_be_written_is_said(publisher: FakePublisher, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PROGRAM, "watch", *arguments, f"a={publisher.endpoint}"],
            env=environ(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last == "kvcache-otel watch: standard output cannot be written: No space left on device"


class Terminal:
    """A watch in a terminal of its own, and what it has written there.

    Attributes:
        process: The process.
        screen: All that it has written, without colours.
    """

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, "watch", *arguments],
            env=environ(**variables),
            stdout=self._theirs,
            stderr=self._theirs,
            stdin=subprocess.DEVNULL,
        )
        self.screen = ""

    def stop(self, stopped: bool) -> None:
        """Does what Ctrl-S does, or Ctrl-Q: writing to it waits."""
        termios.tcflow(self._theirs, termios.TCOOFF if stopped else termios.TCOON)

    def shown(self, pattern: str) -> bool:
        while select.select([self._ours], [], [], 0.05)[0]:
            try:
                more = os.read(self._ours, 65536)
            except OSError:  # The other side is closed.
                break
            if not more:
                break
            self.screen = COLOURS.sub("", self.screen + more.decode(errors="replace"))
        return re.search(pattern, self.screen) is not None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_live_table_in_a_terminal(publisher: FakePublisher, number: int) -> None:
    arguments = "--every", "0.1", f"[b]a[/b]={publisher.endpoint}", f"x=tcp://127.0.0.1:{free_port()}"
    with closing(Terminal(*arguments)) as it:
        subscribed(publisher)
        wait_until(lambda: it.shown(r"worker +rank +device"))
        publisher.publish(stored(list(range(1234))))
        wait_until(lambda: it.shown(r"\[b\]a\S* +0 +vllm +- +1,234 "))
        wait_until(lambda: it.shown(r"WARNING kvcache: source 'x' cannot be reached at tcp://127\.0\.0\.1:\d+; it is"))
        it.process.send_signal(number)
        wait_until(lambda: it.shown(r"\x1b\[\?25h") and it.process.poll() is not None)
        assert it.process.returncode == 0
        assert "Traceback" not in it.screen
        assert "no room for" not in it.screen
        # The table is erased before something is logged, and drawn again below it.
        assert re.search(
            r"\x1b\[2K([-0-9:, ]+INFO .*\r\n)*[-0-9:, ]+WARNING kvcache: source 'x' .*\r\nworker ", it.screen
        )


@pytest.mark.parametrize("form", ["xterm", "dumb"])
def test_a_terminal_that_is_stopped_holds_nothing_up(publisher: FakePublisher, form: str) -> None:
    variables = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": str(port := free_port())}
    with closing(Terminal("--every", "0.05", f"a={publisher.endpoint}", **variables, TERM=form)) as it:
        subscribed(publisher)
        publisher.publish(stored([0]))
        wait_until(lambda: it.shown("a +0 +vllm|worker=a rank=0"))
        it.stop(True)
        time.sleep(0.3)
        it.shown("")
        before = it.screen
        for number in range(1, 20):
            publisher.publish(stored([number]))
            wait_until(lambda blocks=number + 1: f" {blocks}.0\n" in _resident(port))
        for number in range(20):  # Each is a line of the log, as many as there may be.
            publisher.send(f"topic {number}".encode(), b"no number", b"")
        publisher.publish(stored([100]))
        wait_until(lambda: " 21.0\n" in _resident(port))
        it.shown("")
        assert it.screen == before, "nothing can be written to it"
        it.stop(False)
        wait_until(lambda: it.shown(r"a +0 +vllm +(- +)?21 |device=21 "))
        it.stop(True)
        time.sleep(0.3)
        began = time.monotonic()
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(20) == 0
        assert time.monotonic() - began < SOON


def _resident(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return "".join(line for line in io.TextIOWrapper(answer) if line.startswith("kvcache_resident_blocks{"))


def test_a_live_table_says_what_it_has_no_room_for(publisher: FakePublisher) -> None:
    name = "inference-engine-of-a-pod-with-a-long-name-0"
    with closing(Terminal("--every", "0.1", f"{name}={publisher.endpoint}", COLUMNS="80")) as it:
        subscribed(publisher)
        publisher.publish(stored(list(range(1234))), stored([1], "CPU"), stored([1], "DISK"))
        wait_until(lambda: it.shown(r" 1,234 +1 .*\s+no room for: \S+"))
        # A line that is drawn again is the same line, with a return and what erases it in between.
        [*_, head] = re.findall(r"worker +rank[^\r\n\x1b]*", it.screen)
        [*_, row] = re.findall(r"inference\S*…[^\r\n\x1b]*", it.screen)
        [*_, left_out] = re.findall(r"no room for: ([^\r\n\x1b]*)", it.screen)
        columns = "worker rank engine state device host disk events lost recovered duplicate resets failures age"
        assert {*head.split(), *left_out.strip().split(", ")} >= {*columns.split()} - {"state"}
        assert {"worker", "rank", "device", "host", "lost", "failures"} <= {*head.split()}
        assert max(len(head.rstrip()), len(row.rstrip()), len(left_out.rstrip()) + 13) <= 80
        assert re.match(r"inference-\S*…\S*name-0 ", row)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_the_table_of_a_terminal_fits_and_that_of_a_pipe_is_whole(publisher: FakePublisher, term: str) -> None:
    name = "inference-engine-of-a-pod-with-a-long-name-名-0"
    arguments = "--once", "--seconds", "2", f"{name}={publisher.endpoint}"
    with closing(Terminal(*arguments, COLUMNS="80", TERM=term)) as it:
        subscribed(publisher)
        publisher.publish(stored(list(range(1234))), stored([1], "CPU"), stored([1], "DISK"))
        wait_until(lambda: it.shown(r"no room for: .*\n"))
        lines = it.screen.replace("\r", "").splitlines()
        table = lines[next(place for place, line in enumerate(lines) if line.startswith("worker ")) :][:3]
        assert all(cell_len(line) <= 80 for line in table)
        assert re.match(r"inferen\S*…\S*名-0 +0 .* 1,234 ", table[1])
        assert re.match("no room for: .*duplicate", table[2])
    whole = subprocess.run(
        [*PROGRAM, "watch", *arguments],
        env=environ(COLUMNS="40", PYTHONIOENCODING="utf-8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=True,
    ).stdout.decode()
    head, row = whole.splitlines()
    assert head.split() == ["worker", "rank", "state", "device", "failures"]
    assert row.split()[0] == name


def test_a_dumb_terminal_gets_lines(publisher: FakePublisher) -> None:
    with closing(Terminal("--every", "0.1", f"a={publisher.endpoint}", TERM="dumb")) as it:
        subscribed(publisher)
        publisher.publish(stored([1, 2]))
        wait_until(lambda: it.shown(r"worker=a rank=0 engine=vllm device=2 events=1 "))
        it.process.send_signal(signal.SIGTERM)
        wait_until(lambda: it.shown("released") and it.process.poll() is not None)
        assert it.process.returncode == 0
        assert "\x1b" not in it.screen


@pytest.mark.parametrize("width", range(1, 120, 7))
@pytest.mark.parametrize("name", [5, 40])
def test_columns_that_fit(width: int, name: int) -> None:
    widths = {"name": name, "a": 10, "b": 20, "c": 5, "d": 15}
    found = fit(widths, "name", ["c", "b", "a"], width)
    assert sorted([*found.columns, *found.left_out]) == sorted(widths)
    assert found.columns == [column for column in widths if column in found.columns]
    assert found.left_out == [column for column in widths if column in ["c", "b", "a"][: len(found.left_out)]]
    taken = found.name + sum(widths[column] for column in found.columns if column != "name")
    assert taken <= width or len(found.left_out) == 3
    assert min(name, SHORTEST_NAME) <= found.name <= name
    if found.left_out:  # None that had room.
        last = ["c", "b", "a"][len(found.left_out) - 1]
        assert taken - found.name + min(name, SHORTEST_NAME) + widths[last] > width
    elif found.name < name:
        assert taken == width


@pytest.mark.parametrize("width", range(1, 14))
def test_a_name_that_is_shortened(width: int) -> None:
    short = shortened("abcdefghijkl", width)
    assert len(short) == min(width, 12)
    head, dots, tail = short.partition("…")
    assert "abcdefghijkl".startswith(head)
    assert "abcdefghijkl".endswith(tail)
    assert bool(dots) is (width < 12)
    assert not dots or len(head) - len(tail) in (0, 1)
    assert shortened("ab" * 3, 5, lambda text: 2 * len(text)) == "a…"


def test_what_publishers_choose_cannot_command_a_terminal() -> None:
    recorder = Recorder(Identity("custom", "TestWatch"), series_limit=series(2))
    watch = Watch(BlockIndex(recorder))
    for name in ("in/\x1b]0;me\x07\n", "b", "c"):
        watch.index.add(name, engine="vllm").receive(batch(stored([1])))
    watch.index.add("d", engine="vllm")
    found = watch_view.rows(recorder, watch)
    assert [row.cells[:3] for row in found] == [
        (OTHER, "-1", "-"),
        ("b", "0", "vllm"),
        ("in/\\x1b]0;me\\x07\\n", "0", "vllm"),
    ]
    assert len(watch_view.table(found).splitlines()) == 4
    watch.close()


def test_failures_are_a_workers_and_shown_once() -> None:
    recorder = Recorder(Identity("custom", "TestWatch"), series_limit=series(4))
    watch = Watch(BlockIndex(recorder))
    for name, ranks in (("a", 3), ("b", 1)):
        worker = watch.index.add(name, engine="vllm")
        for rank in range(ranks):
            worker.receive(batch(stored([1]), rank=rank))
    for _ in range(7):
        watch.index.workers["a"].receive(b"no batch")
    found = watch_view.rows(recorder, watch)
    column = watch_view._COLUMNS.index("failures")
    assert [(*row.cells[:2], row.cells[column]) for row in found] == [
        ("a", "0", "7"),
        ("a", "1", "-"),
        ("a", "2", "-"),
        ("b", "0", "0"),
    ]
    assert "failures 7" in watch_view.table(found, 20), "what there is no room for, with its sum"
    assert watch_view.lines(found).count("failures=") == 2
    watch.close()


NAMES = [
    *(
        "a",
        "-",
        "1,024",
        "12 s",
        'say "a"',
        "back\\slash",
        "a b",
        "a=b rank=7",
        "tcp://[fe80::1%eth0]:5557",
        "ä/ß",
        "名",
    ),
    *(
        "in/\x1b]0;me\x07",
        "two\nlines",
        "two\x85lines",
        "two\u2028lines",
        "tab\tand\0",
        "\u202egpj.exe",
        "x" * 10_000,
        "\ud800",
    ),
]


def test_a_line_is_one_row_and_can_be_read_back_whatever_its_name_is() -> None:
    recorder = Recorder(Identity("custom", "TestWatch"), series_limit=series(len(NAMES)))
    watch = Watch(BlockIndex(recorder))
    expected: list[dict[str, Any]] = []
    for number, name in enumerate(NAMES):
        watch.index.add(name, engine="vllm").receive(batch(stored(list(range(1234 + number)))))
        label = watch.index.workers[name].label
        expected.append({"worker": label, "rank": "0", "engine": "vllm", "device": f"{1234 + number}"})
    text = watch_view.lines(watch_view.rows(recorder, watch))
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    found = [
        {
            key: json.loads(value) if value.startswith('"') else value
            for key, value in re.findall(r'(\S+?)=("(?:[^"\\]|\\.)*"|\S+)', line)
            if key in expected[0]
        }
        for line in text.splitlines()
    ]
    assert found == sorted(expected, key=lambda line: line["worker"])
    assert sum(f"worker={name} " in text for name in ("a", "-", "ä/ß", "名")) == 4, "what is plain needs no quotes"
    watch.close()


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_file_of_sources_that_changes(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    a, b, c = (FakePublisher(context) for _ in range(3))
    file = tmp_path / "sources"
    file.write_text(f"# two\na={a.endpoint}\nb={b.endpoint}\nwrong\n")
    with watching("--every", "0.1", "--sources", str(file)) as it:
        it.says("WARNING kvcache: .*sources', line 4: source 'wrong': it must be ")
        subscribed(a)
        subscribed(b)
        a.publish(stored([1]))
        b.publish(stored([1, 2]))
        it.says("^worker=a rank=0 .*device=1 ")
        it.says("^worker=b rank=0 .*device=2 ")
        file.write_text(f"b={b.endpoint}\nc={c.endpoint}\n")
        subscribed(c)
        b.publish(stored([3]))
        c.publish(stored([4]))
        it.says("^worker=b rank=0 .*device=3 ")
        it.says("^worker=c rank=0 .*device=1 ")
        it.out.clear()
        it.says("^worker=c")
        assert not [line for line in it.out[:-1] if line.startswith("worker=a")]
        assert it.end(signal.SIGTERM) < SOON


def test_what_is_wrong_with_a_file_of_sources_is_counted(publisher: FakePublisher, tmp_path: Path) -> None:
    file = tmp_path / "sources"
    file.write_text(f"a={publisher.endpoint}\nwrong\n")
    variables = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}

    def complaints() -> float:
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        [found] = re.findall(r'^kvcache_telemetry_errors_total{.*hook="watch.sources".*} (\S+)$', text, re.MULTILINE)
        return float(found)

    with watching("--sources", str(file), **variables) as it:
        port = it.says(r"Prometheus at http://\S+:(\d+)")[1]
        subscribed(publisher)
        wait_until(lambda: complaints() == 1)
        file.write_text(f"a={publisher.endpoint}\nwrong\nb=tcp://\n")
        wait_until(lambda: complaints() == 2)
        file.write_text(f"a={publisher.endpoint}\na={publisher.endpoint}?topic=x\nlong=ipc://{'x' * 200}\n")
        wait_until(lambda: complaints() == 4)  # One contradicts, and one ZeroMQ does not take.
        it.says("WARNING kvcache: source 'a' is there twice at .*, the second time with topic=x")
        it.says("ERROR kvcache: source 'long' is left out as long as this lasts: ipc://xxx")
        assert it.end(signal.SIGTERM) < SOON


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "kvcache-otel watch: there is no SOURCE: [name=]tcp://host:port"),
        (["nonsense"], "kvcache-otel watch: source 'nonsense': it must be [name=]tcp://host:port"),
        (["tcp://h:1", "a=tcp://h"], "kvcache-otel watch: source 'a=tcp://h': tcp://h is not tcp://host:port"),
        (["ipc:///\udcff"], "kvcache-otel watch: source 'ipc:///?': there is something in it that cannot be printed"),
        (
            ["a=tcp://h:1", "a=tcp://h:1?topic=x"],
            "kvcache-otel watch: source 'a' is there twice at tcp://h:1, the second",
        ),
        (
            ["a=tcp://h:1?engine=vllm", "a=tcp://h:2?engine=sglang"],
            "kvcache-otel watch: source 'a' at tcp://h:2 has engine=sglang, and at tcp://h:1 engine=vllm",
        ),
        (["--seconds", "0", "tcp://h:1"], "argument --seconds: '0' is no number of seconds above 0"),
        (["--seconds", "nan", "tcp://h:1"], "argument --seconds: 'nan' is no number of seconds above 0"),
        (["--every", "x", "tcp://h:1"], "argument --every: 'x' is no number of seconds above 0"),
        (["--colour", "tcp://h:1"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert why in err.splitlines()[-1]
    assert "left out" not in err, "nothing is: the command ends"
    assert len([line for line in err.splitlines() if "usage:" not in line and not line.startswith(" ")]) == 1


@pytest.mark.parametrize("what", ["nothing", "directory", "nonsense"])
def test_a_file_that_cannot_be_what_was_meant(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path, what: str
) -> None:
    path = tmp_path if what == "directory" else tmp_path / "file"
    if what == "nonsense":
        path.write_text("nonsense\n")
    assert run(capsys, "--sources", str(path))[0] == 2
    [said] = caplog.messages
    assert str(path) in said


@pytest.mark.parametrize("module", ["zmq", "msgspec"])
def test_a_missing_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    status, out, err = run(capsys, "tcp://h:1")
    assert (status, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("kvcache-otel watch: ")
    assert module in line
    assert line.endswith("install the extra 'watch': pip install 'kvcache-otel[watch]', in a checkout of it '.[watch]'")


def test_a_missing_table_library_is_missed_in_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert run(capsys, "nonsense")[2].startswith("kvcache-otel watch: source 'nonsense'")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, _, err = run(capsys, "tcp://h:1")
    assert status == 2
    assert "rich" in err
    assert "install the extra 'watch': " in err


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.otlp
def test_a_signal_ends_it_soon_and_after_a_last_export(publisher: FakePublisher, number: int) -> None:
    require("otlp")
    with otlp_receiver() as receiver:
        variables = {
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "3600000",
        }
        with watching("--every", "0.1", f"a={publisher.endpoint}?engine=sglang", **variables) as it:
            subscribed(publisher)
            for number_ in range(20):
                publisher.publish(stored([number_, 1000]), stored([number_], "CPU"), drop=number_ in (5, 6))
            publisher.publish(removed([1, 2, 10**6]))
            it.says("^worker=a .*device=17 .*events=37 lost=2 ")
            assert receiver.metrics() == []
            assert it.end(number) < SOON
        owner = {"kvcache.worker": "a", "kvcache.rank.dp": 0}

        def got(name: str, **labels: str | int) -> int | float | None:
            wanted = {key.replace("_", "."): value for key, value in labels.items()}
            row = receiver.wait_for(name, {**(owner if "kvcache.reason" not in wanted else {}), **wanted})
            return row.value

        view = {"kvcache_view": "received"}
        assert got("kvcache.resident.blocks", kvcache_tier="device", **view) == 17
        assert got("kvcache.resident.blocks", kvcache_tier="host", **view) == 18
        assert got("kvcache.event.batches.lost") == 2
        assert got("kvcache.event.batches.recovered") == 0
        assert got("kvcache.event.publisher.resets") == 0
        stored_on = {"kvcache_event_type": "block_stored", "kvcache_event_medium": "device"}
        assert got("kvcache.events", **stored_on, **view) == 18
        assert got("kvcache.event.blocks", **stored_on, **view) == 36
        assert got("kvcache.accounting.errors", kvcache_reason="unknown_remove") == 1
        assert receiver.wait_for("kvcache.index.maintained").value == 1
        assert 0 <= (receiver.wait_for("kvcache.event.last.age", owner).value or 0) < 60
        assert len({row.time_ns for row in receiver.find("kvcache.resident.blocks")}) == 1
        assert len(receiver.find("kvcache.events", owner)) == CELLS


def test_a_collector_that_is_not_there_does_not_keep_it(publisher: FakePublisher) -> None:
    variables = {
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    with watching("--every", "0.1", f"a={publisher.endpoint}", **variables) as it:
        subscribed(publisher)
        publisher.publish(stored([1]))
        it.says("^worker=a rank=0 .*device=1 ")
        assert it.end(signal.SIGTERM) < SOON


def test_seconds_end_it(publisher: FakePublisher) -> None:
    with watching("--seconds", "0.5", f"a={publisher.endpoint}") as it:
        assert it.process.wait(20) == 0
    assert it.out == ["worker=a state=silent failures=0\n"]


def test_once_fails_where_nothing_could_be_reached(publisher: FakePublisher) -> None:
    down = f"down=tcp://127.0.0.1:{free_port()}"
    with watching("--once", "--seconds", "0.6", down) as it:
        assert it.process.wait(20) == 1
    assert [line.split()[:4] for line in it.out] == [["worker", "rank", "state", "device"], ["down", "-", "down", "-"]]
    assert it.err[-1] == "kvcache-otel watch: no source was connected\n"
    with watching("--once", "--seconds", "1.5", down, f"silent={publisher.endpoint}") as it:
        assert it.process.wait(20) == 0
    assert it.out[2].split()[:4] == ["silent", "-", "silent", "-"]
    assert not [line for line in it.err if "no source" in line]
    both = down.replace("down=", "both="), f"both={publisher.endpoint}"  # The worse is said.
    with watching("--once", "--seconds", "1.5", *both) as it:
        assert it.process.wait(20) == 0
    assert [line.split()[:3] for line in it.out[1:]] == [["both", "-", "down"]]


def test_once_fails_where_nobody_speaks_zeromq() -> None:
    with (
        tcp_server(lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port,
        watching("--once", "--seconds", "1", f"http=tcp://127.0.0.1:{port}") as it,
    ):
        assert it.process.wait(20) == 1


def test_a_source_that_goes_is_down(publisher: FakePublisher, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    other = FakePublisher(context)
    with watching("--every", "0.1", f"a={publisher.endpoint}", f"a={other.endpoint}") as it:
        subscribed(publisher)
        subscribed(other)
        publisher.publish(stored([1]))
        it.says("^worker=a rank=0 engine=vllm device=1 ")
        it.says("^worker=a (engine=vllm )?state=silent ")
        publisher.close()
        it.says("^worker=a rank=0 engine=vllm state=down device=1 ")
        other.publish(stored([1, 2]), rank=1)
        it.says("^worker=a rank=1 engine=vllm device=2 ")
        it.out.clear()
        it.says("^worker=a rank=1")
        assert not [line for line in it.out if "silent" in line]


@pytest.mark.prometheus
def test_a_scrape_of_more_than_2000_series(publisher: FakePublisher) -> None:
    require("prometheus")
    ranks = 100
    variables = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}
    with watching(f"a={publisher.endpoint}?engine=vllm", **variables) as it:
        port = it.says(r"Prometheus at http://\S+:(\d+)")[1]
        subscribed(publisher)
        for rank in range(ranks):
            publisher.publish(stored(list(range(rank + 1))), rank=rank)
        with prometheus_server([f"localhost:{port}"]) as prometheus:
            name = "kvcache_resident_blocks"
            prometheus.wait_for(f"sum({name}) == {sum(range(ranks + 1))}")
            blocks = {int(sample.labels["kvcache_rank_dp"]): sample.value for sample in prometheus.query(name)}
            assert blocks == {rank: rank + 1 for rank in range(ranks)}
            [count] = prometheus.query("count(kvcache_events_total)")
            assert count.value == ranks * CELLS > 2000
            [total] = prometheus.query("sum(kvcache_events_total)")
            assert total.value == ranks
            assert prometheus.query('{otel_metric_overflow!=""}') == []
        assert it.end(signal.SIGTERM) < SOON


# -- what is not imported ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import kvcache_otel",
        "import kvcache_otel.plugin, kvcache_otel.instrumentor, kvcache_otel.cli.command",
        "from kvcache_otel.cli.command import run; run(['doctor'])",
        "from kvcache_otel.cli.command import run; run(['watch'])",
    ],
)
def test_the_libraries_of_the_extra_are_imported_only_for_it(code: str) -> None:
    wanted = ("zmq", "msgspec") if "'watch'" in code else ()
    report = "import sys; print([name for name in ('zmq', 'msgspec', 'rich') if name in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], env=environ(), capture_output=True, text=True, timeout=60
    )
    assert sorted(eval(done.stderr.splitlines()[-1])) == sorted(wanted)


def _row_of(**numbers: str) -> watch_view.Row:
    cells = dict.fromkeys(watch_view._COLUMNS, "0")
    cells |= {"worker": "inference-engine-of-a-pod-0", "engine": "vllm", "state": "connected", "age": "0.1 s"}
    return watch_view.Row(tuple((cells | numbers).values()), cells["worker"])


@pytest.mark.parametrize("width", range(24, 160, 4))
def test_a_column_above_zero_is_not_hidden_without_a_word(width: int) -> None:
    found = [_row_of(resets="1", recovered="1,040"), _row_of(recovered="2", lost="-")]
    shown = watch_view.fitted(found, width, 2)
    for column, total in (("resets", "1"), ("recovered", "1,042")):
        assert (column in shown.cells) is not (f"{column} {total}" in shown.left_out)
    if "engine" in shown.cells or "duplicate" in shown.cells:  # What says less goes first.
        assert {"resets", "recovered"} <= {*shown.cells}
    assert {*shown.cells, *(name.partition(" ")[0] for name in shown.left_out)} == {*watch_view._COLUMNS}


def test_at_80_columns_what_is_above_zero_is_shown() -> None:
    [_, line, *_] = watch_view.table([_row_of(device="12,345", resets="1", recovered="40")], 80).splitlines()
    assert re.search(r" 12,345 .* 40 +1( |$)", line), line
