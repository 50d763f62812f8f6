"""`kvcache-otel demo` as a process: what it shows, serves and pushes, how it ends, and what it refuses."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcache_otel.cli import command, demo_rows
from kvcache_otel.demo import cache as demo_cache
from kvcache_otel.demo import workload as demo_workload
from tests.cli.screen import on_screen
from tests.conftest import require
from tests.support.otlp_receiver import otlp_receiver
from tests.support.processes import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from kvcache_otel.demo.config import Config
    from kvcache_otel.record.recorder import Recorder

PROGRAM = [sys.executable, "-c", "import sys; from kvcache_otel.cli import main; sys.exit(main())"]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TIERS = ("device", "host", "disk")


def environ(**more: str) -> dict[str, str]:
    """The environment without what decides about exports, and with what a test wants."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "PROMETHEUS_"))}
    return {**kept, "TERM": "xterm", **more}


class Running(NamedTuple):
    """A demo in a process of its own.

    Attributes:
        process: The process.
        out: The lines of its output so far.
        err: The lines that it said besides.
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
def running(*arguments: str, program: list[str] = PROGRAM, **variables: str) -> Generator[Running]:
    process = subprocess.Popen(
        [*program, "demo", *arguments],
        env=environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    it = Running(process, [], [])
    readers = [
        threading.Thread(target=lambda stream=stream, lines=lines: lines.extend(iter(stream.readline, "")))
        for stream, lines in ((process.stdout, it.out), (process.stderr, it.err))
        if stream is not None
    ]
    for reader in readers:
        reader.start()
    try:
        yield it
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()


class Samples(NamedTuple):
    """One scrape."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples that have these labels; names and labels go without ``kvcache_``."""
        wanted = {(f"kvcache_{key}", value) for key, value in labels.items()}
        return sum(value for (of, has), value in self.values.items() if of == f"kvcache_{name}" and wanted <= has)


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return Samples(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
    )


def parts(line: str) -> dict[str, str]:
    """Returns what a line of a pipe says, by its names."""
    return dict(part.split("=", 1) for part in line.split())


def rows_of(out: list[str]) -> dict[str, list[str]]:
    """Returns the words of each tier in the table at the end, by the tier."""
    first = max(place for place, line in enumerate(out) if line.startswith("tier "))
    return {line.split()[0]: line.split() for line in out[first + 1 : first + 5]}


# -- what it serves, pushes and shows ----------------------------------------------------------------------------------


def test_it_serves_what_closes_while_it_runs(tmp_path: Path) -> None:
    with running("--port", "0", "--seconds", "30", "--rate", "100", TMPDIR=str(tmp_path)) as it:
        url = it.says(r"metrics at (http://localhost:\d+/metrics)")[1]
        wait_until(lambda: scrape(url).sum("lookup_tokens_total", tier="disk") > 0)
        seen: Counter[str] = Counter()
        for _ in range(20):
            found = scrape(url)
            for tier in TIERS:
                # The rows of a pool are made of one answer, whatever the cache is doing.
                parts_of = sum(found.sum("usage", tier=tier, state=state) for state in ("used", "evictable", "free"))
                assert parts_of == found.sum("limit", tier=tier) > 0
                held, published = (found.sum("resident_blocks", tier=tier, view=view) for view in ("held", "published"))
                seen[tier] += held == published > 0
            for name in ("accounting_errors_total", "telemetry_errors_total", "telemetry_dropped_total"):
                assert found.sum(name) == 0
            assert found.sum("telemetry_hook_attached") > 10
            time.sleep(0.05)
        assert min(seen[tier] for tier in TIERS) >= 5, "between steps the two views are the same"
        assert it.end(signal.SIGINT) < 4
    assert list(tmp_path.iterdir()) == []


class Kept(NamedTuple):
    """What a demo in this process has used.

    Attributes:
        caches: Its caches.
        workloads: What drove them.
        seen: What it has shown.
    """

    caches: list[demo_cache.TieredCache]
    workloads: list[demo_workload.Workload]
    seen: list[demo_rows.Seen]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Lets a demo run in this process, and what it has used be looked at."""
    it = Kept([], [], [])
    read = demo_rows.read

    class Cache(demo_cache.TieredCache):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            it.caches.append(self)

    class Workload(demo_workload.Workload):
        def __init__(self, cache: demo_cache.TieredCache, shape: demo_workload.Shape) -> None:
            super().__init__(cache, shape)
            it.workloads.append(self)

    def reading(recorder: Recorder) -> demo_rows.Seen:
        it.seen.append(read(recorder))
        return it.seen[-1]

    monkeypatch.setattr(demo_cache, "TieredCache", Cache)
    monkeypatch.setattr(demo_workload, "Workload", Workload)
    monkeypatch.setattr(demo_rows, "read", reading)
    before = dict(os.environ)
    for name in before:
        if name.startswith(("OTEL_", "PROMETHEUS_")):
            del os.environ[name]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield it
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(before)


def test_it_shows_what_the_cache_itself_has_counted(
    kept: Kept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing of the view reads the cache's books: here they are the oracle."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = set(threading.enumerate())
    publish = ("--publish", "tcp://127.0.0.1:*", "--replay", "tcp://127.0.0.1:*")
    assert command.run(["demo", "--seconds", "3", "--rate", "0", "--every", "1", "--port", "0", *publish]) == 0
    out, err = capsys.readouterr()
    said, _ = err.splitlines()
    assert said.startswith("kvcache-otel demo: metrics at http://localhost:")
    [cache], seen, books = kept.caches, kept.seen[-1], kept.caches[0].books
    assert len(kept.seen) == 3

    served = {tier: books["tokens served", tier] for tier in TIERS}
    assert all(served.values())
    assert {row.tier: row.served for row in seen.tiers} == served
    assert seen.prompt == books["tokens prompted"]
    assert seen.computed == books["tokens prompted"] - sum(served.values())
    blocks = {"device": cache.tree.held["device"], "host": cache.tree.held["host"], "disk": len(cache.storage.index)}
    assert {row.tier: row.held for row in seen.tiers} == {row.tier: row.published for row in seen.tiers} == blocks
    for row in seen.tiers:
        assert None not in (row.used, row.evictable, row.free)
        assert (row.used or 0) + (row.evictable or 0) + (row.free or 0) == row.limit
    moved = {(row.source, row.destination): (row.transfers, row.bytes) for row in seen.routes}
    for way in (("device", "host"), ("host", "device")):  # The disk's go on while one looks.
        assert moved[way] == (books["copies", *way], books["bytes copied", *way])
    assert seen.prefetch["hit"] == sum(seen.prefetch[name] for name in ("fulfilled", "unfulfilled", "outstanding")) > 0
    assert any(row.amount for row in seen.losses if row.what == "dropped")
    assert seen.doubts == {}

    # It is what is printed,
    shown = rows_of(out.splitlines())
    assert {tier: shown[tier][1] for tier in TIERS} == {tier: whole(tokens) for tier, tokens in served.items()}
    assert {tier: shown[tier][-2:] for tier in TIERS} == {tier: [whole(count)] * 2 for tier, count in blocks.items()}
    assert shown["computed"][1] == whole(seen.computed)
    # and nothing is left of it.
    assert not [name for name in vars(cache) if "kvcache" in name]
    wait_until(lambda: set(threading.enumerate()) <= threads, what=f"{threading.enumerate()}")
    assert list(tmp_path.iterdir()) == []


def whole(number: float) -> str:
    """Returns the first word of a number as the tables have it: a long one is in millions."""
    return f"{number:,}" if number < 1e6 else f"{number / 1e6:.2f}"


def test_it_keeps_to_its_rate(kept: Kept) -> None:
    assert command.run(["demo", "--seconds", "1", "--rate", "20", "--port", "0"]) == 0
    [workload] = kept.workloads
    assert 5 <= workload.steps <= 21


@pytest.mark.parametrize(
    "arguments",
    [
        ("--disk-tokens", "0"),
        ("--policy", "write_back"),
        ("--memory", "plain"),
        ("--users", "1"),
        ("--turns", "1", "--prefix", "0"),
        ("--host-tokens", "65536"),
        ("--page-tokens", "1", "--token-bytes", "8"),
        ("--device-tokens", "368", "--host-tokens", "16"),
    ],
    ids=" ".join,
)
def test_other_shapes_close_as_well(kept: Kept, arguments: tuple[str, ...]) -> None:
    assert command.run(["demo", "--seconds", "1", "--rate", "0", "--port", "0", *arguments]) == 0
    [cache], seen, books = kept.caches, kept.seen[-1], kept.caches[0].books
    assert seen.doubts == {}
    assert seen.prompt == books["tokens prompted"] > 0
    assert {row.tier for row in seen.tiers} == {"device", "host", *(("disk",) if cache.config.disk_tokens else ())}
    for row in seen.tiers:
        assert row.served == books["tokens served", row.tier]
        assert row.held == row.published
        assert (row.used or 0) + (row.evictable or 0) + (row.free or 0) == row.limit


def test_the_same_seed_is_the_same_run(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [("--seed", "1"), ("--seed", "1"), ("--seed", "2")]
    prompts: list[list[int]] = []
    for shape in shapes:
        assert command.run(["demo", "--seconds", "0.5", "--port", "0", "--disk-tokens", "0", *shape]) == 0
        requests = kept.caches[-1].requests.values()
        prompts.append([token for request in requests for token in request.tokens[:300]])
    assert prompts[0]
    assert prompts[0][:256] == prompts[1][:256] != prompts[2][:256]


@pytest.mark.otlp
def test_it_pushes_when_an_endpoint_is_set_and_serves_as_well() -> None:
    require("otlp")
    with otlp_receiver() as receiver:
        variables = {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "3600000",
            "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
        }
        with running("--every", "0.2", **variables) as it:
            url = it.says(r"metrics at (http://localhost:\d+/metrics)")[1]
            it.says(rf"metrics go by OTLP over HTTP to {receiver.http_endpoint}/v1/metrics every 3600 s$")
            it.says("^tier=disk served=[1-9]")
            assert scrape(url).sum("lookup_tokens_total") > 0
            assert receiver.metrics() == []
            assert it.end(signal.SIGINT) < 4
        shown = rows_of(it.out)
        for tier in TIERS:
            served = receiver.wait_for("kvcache.lookup.tokens", {"kvcache.tier": tier}).value
            assert served is not None
            assert shown[tier][1] == whole(served)
            for view, place in (("held", -2), ("published", -1)):
                row = receiver.find("kvcache.resident.blocks", {"kvcache.tier": tier, "kvcache.view": view})[0]
                assert row.value is not None
                assert shown[tier][place] == whole(row.value)
        durations = receiver.find("kvcache.transfer.duration", {"kvcache.source.tier": "device"})
        assert durations[-1].count > 0
        gauges, counters = ("kvcache.resident.blocks", "kvcache.lookup.tokens")
        device = {"kvcache.tier": "device", "kvcache.view": "held"}
        assert len(receiver.find(gauges, device)) == len(receiver.find(counters, {"kvcache.tier": "device"}))


def test_lines_in_a_pipe_and_tables_in_the_end() -> None:
    with running("--seconds", "1.5", "--every", "0.5", "--port", "0") as it:
        assert it.process.wait(20) == 0
    gap = it.out.index("\n")
    lines, tables = [parts(line) for line in it.out[:gap]], it.out[gap:]
    times = [float(line["at"]) for line in lines if "at" in line]
    assert times == sorted(times) != []
    for line in lines:
        # Between two steps of the scheduler everything closes.
        if "at" in line:
            first = lines.index(line)
            served = sum(int(tier["served"]) for tier in lines[first + 1 : first + 4])
            assert int(line["prompt"]) == served + int(line["computed"]) > 0
        if "held" in line:
            assert int(line["held"]) == int(line["published"])
            assert sum(int(line[state]) for state in ("used", "evictable", "free")) == int(line["limit"])
        if "p50_le" in line:
            assert 0 < float(line["p50_le"]) <= float(line["p99_le"]) <= 60
            assert int(line["bytes"]) > 0
    routes = {(line["source"], line["destination"]) for line in lines if "source" in line}
    assert routes == {("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host")}
    assert {line["reason"] for line in lines if line.get("lost") == "dropped"} >= {"host_pressure", "pool_full"}
    assert re.match(r"kvcache-otel demo: [12] s, \d+ answers; metrics at http://localhost:\d+/metrics$", tables[1])
    assert max(map(len, tables)) <= 81  # With the end of the line.
    for head in ("tier ", "transfers ", "lost or left undone ", "storage had "):
        assert [line for line in tables if line.startswith(head)]


# -- in a terminal -----------------------------------------------------------------------------------------------------


class Terminal:
    """A terminal, and a demo in it.

    Attributes:
        process: The demo.
        screen: Everything that it has written, without what commands the terminal.
    """

    def __init__(
        self, *arguments: str, lines: int = 24, columns: int = 80, term: str = "xterm", program: list[str] = PROGRAM
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        variables = {key: value for key, value in environ(TERM=term).items() if key not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*program, "demo", *arguments], env=variables, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self._raw = b""

    @property
    def screen(self) -> str:
        return CODES.sub("", self.raw)

    @property
    def raw(self) -> str:
        """Everything, with what commands the terminal."""
        while select.select([self._ours], [], [], 0.05)[0]:
            try:
                more = os.read(self._ours, 65536)
            except OSError:  # The other side is closed.
                break
            if not more:
                break
            self._raw += more
        return self._raw.decode(errors="replace")

    def write(self, typed: bytes) -> None:
        os.write(self._ours, typed)

    def shows(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.screen), what=f"{pattern} in {self.screen}")

    def ended(self) -> int:
        wait_until(lambda: self.screen is not None and self.process.poll() is not None)
        return self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_live_view_in_a_terminal(number: int) -> None:
    terminal = Terminal("--port", "0", "--every", "0.2")
    try:
        terminal.shows(r"kvcache-otel demo: \d s, \d+ answers; metrics at http://localhost:\d+/metrics")
        terminal.shows(r"device +[\d,]+ +\d+% +█+▒*·* +3,072 +[\d,]+ +\d+ +\d+")
        terminal.shows(r"device -> host +wall clock +[\d,]+ +[\d.]+ [kM]B +\d+ [um]s +\d+ [um]s +[\d.]+ [kMG]B/s +\d")
        terminal.shows(r"dropped +device write_through_unbacked_eviction +[1-9][\d,]* tokens")
        terminal.process.send_signal(number)
        assert terminal.ended() == 0
        screen = terminal.screen
        assert "Traceback" not in screen
        assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l"), "the cursor is seen again"
        assert max(len(line) for line in re.split(r"[\r\n]+", screen)) <= 80
        # What is there in the end is all of it, the last line too.
        assert screen.rstrip().splitlines()[-1].startswith("storage had ")
    finally:
        terminal.close()


def test_a_narrow_terminal_is_told_what_there_is_no_room_for() -> None:
    terminal = Terminal("--port", "0", "--every", "0.2", lines=50, columns=60)
    try:
        terminal.shows(r"device +[\d,]+ +\d+% +3,072 +[\d,]+ +\d+ +\d+")
        terminal.shows(r"no room for: used, evict, free, timed by, moved")
    finally:
        terminal.close()


@pytest.mark.parametrize("lines", [24, 45, 60])
def test_an_interrupt_from_the_keyboard_leaves_one_view(lines: int) -> None:
    """The terminal itself writes ^C, behind what is drawn."""
    terminal = Terminal("--port", "0", "--every", "0.5", "--rate", "0", lines=lines)
    try:
        terminal.shows(r"disk +\d{3},\d{3} ")
        before = terminal.screen  # All of a view: until there is another, nothing is drawn that ^C could get into.
        assert before
        terminal.write(b"\x03")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 0
        screen = on_screen(terminal.raw, 80)
        assert "^C" in terminal.raw
        assert len([line for line in screen if " answers; " in line]) == 1
        assert len([line for line in screen if line.startswith("tier ")]) == 1
        assert [line for line in screen if line.startswith("storage had ")]
    finally:
        terminal.close()


def test_a_live_view_ends_after_its_seconds() -> None:
    terminal = Terminal("--port", "0", "--seconds", "1", lines=50)
    try:
        assert terminal.ended() == 0
        assert re.search(r"1 s, \d+ answers", terminal.screen)
    finally:
        terminal.close()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_draws_nothing_anew_gets_lines(term: str) -> None:
    terminal = Terminal("--port", "0", "--seconds", "1", "--every", "0.3", term=term)
    try:
        assert terminal.ended() == 0
        assert "\x1b" not in terminal.raw
        assert "rich" not in terminal.screen
        assert re.search(r"^tier=device served=\d+ ", terminal.screen, re.MULTILINE)
        assert re.search(r"^storage had ", terminal.screen, re.MULTILINE)
    finally:
        terminal.close()


def test_an_output_that_knows_ascii_alone() -> None:
    with running("--seconds", "1", "--port", "0", PYTHONIOENCODING="ascii", PYTHONUTF8="0") as it:
        assert it.process.wait(20) == 0
    assert "".join(it.out).isascii()
    assert "\\u" not in "".join(it.out)
    assert re.match(r"[#=.]{14}$", rows_of(it.out)["device"][3])


def test_lines_in_a_terminal_without_rich() -> None:
    without = [sys.executable, "-c", "import sys; sys.modules['rich'] = None; " + PROGRAM[-1]]
    terminal = Terminal("--port", "0", "--seconds", "1", "--every", "0.3", program=without)
    try:
        assert terminal.ended() == 0
        assert "no live view without rich: install the extra 'demo'" in terminal.screen
        assert re.search(r"^tier=device served=\d+ ", terminal.screen, re.MULTILINE)
        assert re.search(r"^storage had ", terminal.screen, re.MULTILINE)
    finally:
        terminal.close()


# -- what decides about exports ----------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_line_and_another_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running("--seconds", "1", "--port", str(port)) as it:
            other = int(it.says(r"metrics at http://localhost:(\d+)/metrics")[1])
            assert it.process.wait(20) == 0
    assert other != port
    warning, said = it.err
    assert re.match(rf"kvcache-otel demo: .*port {port} of localhost cannot be used: Address already in use$", warning)
    assert said.startswith("kvcache-otel demo: metrics at ")


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ([], {"OTEL_METRICS_EXPORTER": "none"}, "nothing is exported: OTEL_METRICS_EXPORTER=none"),
        (["--port", "0"], {"OTEL_METRICS_EXPORTER": "none"}, "metrics at http://localhost:"),
        (["--port", "0"], {"OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1"}, "metrics at http://127.0.0.1:"),
        (["--port", "0"], {"OTEL_EXPORTER_PROMETHEUS_PORT": "x"}, "metrics at http://localhost:"),
    ],
)
def test_variables_decide(arguments: list[str], variables: dict[str, str], said: str) -> None:
    with running("--seconds", "0.5", *arguments, **variables) as it:
        assert it.process.wait(20) == 0
    [line] = it.err
    assert line.startswith(f"kvcache-otel demo: {said}")
    assert rows_of(it.out)["computed"][1] != "0"


def test_a_configuration_file_decides_alone(tmp_path: Path) -> None:
    file = tmp_path / "otel.yaml"
    file.write_text("file_format: '1.0'\nmeter_provider:\n  readers: []\n")
    with running("--seconds", "0.5", "--port", "0", OTEL_CONFIG_FILE=str(file)) as it:
        assert it.process.wait(20) == 0
    assert "kvcache-otel demo: --port does nothing: OTEL_CONFIG_FILE says what is exported\n" in it.err
    assert it.err[-1].startswith(("kvcache-otel demo: metrics go", "kvcache-otel demo: nothing is exported"))
    assert rows_of(it.out)["computed"][1] != "0"


def test_a_collector_that_is_not_there_does_not_keep_it() -> None:
    variables = {
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    with running("--every", "0.1", **variables) as it:
        it.says("^tier=device served=[1-9]")
        assert it.end(signal.SIGTERM) < 5
    assert not [line for line in it.err if "metrics at" in line]
    assert [line for line in it.err if "did not get through" in line and "(OTEL_EXPORTER_OTLP_ENDPOINT)" in line]


# -- events ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "*"])
def test_watch_follows_it_by_the_very_command_that_it_prints(host: str) -> None:
    where = f"tcp://{host}:*"
    with running("--publish", where, "--replay", where, "--port", "0", "--every", "0.2") as it:
        source = it.says("kvcache-otel watch '(demo=tcp://127.0.0.1:\\d+[?]replay=tcp://127.0.0.1:\\d+)'")[1]
        it.says("^tier=disk served=[1-9]")
        done = subprocess.run(
            [*PROGRAM, "watch", "--once", "--seconds", "3", source],
            env=environ(OTEL_METRICS_EXPORTER="none"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert it.end(signal.SIGINT) < 4
    head, row = (line.split() for line in done.stdout.splitlines())
    found = dict(zip(head, row, strict=False))  # An age is two words.
    limits = {"device": 3072 // 16, "host": 6144 // 16, "disk": 16384 // 16}
    assert found["worker"] == "demo"
    assert (found["lost"], found["failures"], found["resets"]) == ("0", "0", "0")
    for tier, limit in limits.items():
        assert 0.5 * limit < int(found[tier].replace(",", "")) <= limit, tier


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--users 0", "argument --users: '0' is no number from 1 to 65536"),
        ("--users 67108864", "argument --users: '67108864' is no number from 1 to 65536"),
        ("--turns -1", "argument --turns: '-1' is no number from 1 to 67108864"),
        ("--prefix x", "argument --prefix: 'x' is no number from 0 to 67108864"),
        ("--device-tokens -5", "argument --device-tokens: '-5' is no number from 1 to 67108864"),
        (
            "--host-tokens 99999999999999999999999",
            "argument --host-tokens: '99999999999999999999999' is no number from",
        ),
        ("--device-tokens 8", "kvcache-otel demo: --device-tokens is 8, less than one page of 16"),
        (
            "--device-tokens 100",
            "kvcache-otel demo: the device has 96 tokens, and one turn of a conversation needs 368",
        ),
        ("--page-tokens 3 --token-bytes 3", "kvcache-otel demo: a page has 9 bytes"),
        ("--seconds 0", "argument --seconds: '0' is no number of seconds above 0"),
        ("--seconds nan", "argument --seconds: 'nan' is no number of seconds above 0"),
        ("--every inf", "argument --every: 'inf' is no number of seconds above 0"),
        ("--rate -1", "argument --rate: '-1' is no number of steps a second, 0 or more"),
        ("--rate nan", "argument --rate: 'nan' is no number of steps a second, 0 or more"),
        ("--port 65536", "argument --port: '65536' is no port from 0 to 65535"),
        ("--policy never", "argument --policy: invalid choice: 'never'"),
        (
            "--publish tcp://127.0.0.1:99999",
            "kvcache-otel demo: --publish tcp://127.0.0.1:99999: 99999 is no port from 0 to 65535",
        ),
        (
            "--publish tcp://127.0.0.1:* --replay tcp://127.0.0.1:65536",
            "--replay tcp://127.0.0.1:65536: 65536 is no port from 0 to 65535",
        ),
        ("--publish tcp://127.0.0.1:9464x", "--publish tcp://127.0.0.1:9464x: 9464x is no port from 0 to 65535"),
        ("--publish nonsense", "--publish nonsense: it is neither tcp://host:port nor ipc://path"),
        ("--publish inproc://here", "--publish inproc://here: it is neither tcp://host:port nor ipc://path"),
        ("--publish tcp://nonsense", "kvcache-otel demo: --publish tcp://nonsense: Invalid argument"),
        ("--replay tcp://127.0.0.1:*", "kvcache-otel demo: --replay needs --publish"),
        ("--colour", "kvcache-otel demo: error: unrecognized arguments: --colour"),
        ("bogus", "kvcache-otel demo: error: unrecognized arguments: bogus"),
    ],
)
def test_bad_arguments(
    kept: Kept,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    why: str,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = set(threading.enumerate())
    status = 0
    try:
        status = command.run(["demo", *arguments.split()])
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert why in err.splitlines()[-1]
    assert "usage:" not in err or err.startswith("usage: kvcache-otel demo [-h] [--users N] ")
    assert len([line for line in err.splitlines() if "usage:" not in line and not line.startswith(" ")]) == 1
    wait_until(lambda: set(threading.enumerate()) <= threads, what=f"{threading.enumerate()}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["zmq", "msgspec"])
def test_events_without_their_libraries(
    kept: Kept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert command.run(["demo", "--publish", "tcp://127.0.0.1:*"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvcache-otel demo: --publish: ")
    assert module in line
    assert line.endswith("pip install 'kvcache-otel[demo]', in a checkout of it '.[demo]'")


def test_it_is_said_when_nothing_may_be_measured(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["OTEL_SDK_DISABLED"] = "true"
    assert command.run(["demo"]) == 2
    assert capsys.readouterr() == ("", "kvcache-otel demo: nothing is exported: OTEL_SDK_DISABLED=true\n")


def test_an_output_that_is_closed_is_not_missed() -> None:
    command_line = [*PROGRAM, "demo", "--seconds", "0.3", "--port", "0"]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command_line], env=environ(), stderr=subprocess.PIPE, text=True, timeout=60
    )
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, line.startswith("kvcache-otel demo: metrics at http://")) == (0, True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is nothing that is always full")
def test_what_cannot_be_written_is_said() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PROGRAM, "demo", "--port", "0", "--every", "0.1"],
            env=environ(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    said = ["kvcache-otel demo: standard output cannot be written: No space left on device"]
    assert (ended.returncode, ended.stderr.splitlines()[1:]) == (1, said)


def test_a_reader_who_has_read_enough_ends_it() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "demo", "--port", "0", "--every", "0.1"],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("at=")
    process.stdout.close()
    assert process.wait(20) == 1
    assert process.stderr is not None
    with process.stderr as err:
        said = ["kvcache-otel demo: whoever read the output is gone, and so it ends"]
        assert err.read().splitlines()[1:] == said


# -- what is not imported ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        (
            "import kvcache_otel, kvcache_otel.plugin, kvcache_otel.instrumentor",
            ("kvcache_otel.demo", "kvcache_otel.cli"),
        ),
        (
            "from kvcache_otel.cli.command import run; run(['doctor'])",
            ("kvcache_otel.demo.cache", "numpy", "rich", "zmq"),
        ),
        ("from kvcache_otel.cli.command import run; run(['demo', '--seconds', '0.2', '--port', '0'])", ("rich", "zmq")),
    ],
)
def test_what_is_not_wanted_is_not_imported(code: str, modules: tuple[str, ...]) -> None:
    report = f"import sys; print([name for name in {modules} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], env=environ(), capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == "[]"
