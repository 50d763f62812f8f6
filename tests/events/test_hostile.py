"""Publishers and replays that send more than anybody wants: memory is bounded, they are named, and others are exact."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.events import feed as feed_module
from kvcache_otel.events import index as index_module
from kvcache_otel.events import subscription as subscription_module
from kvcache_otel.events import watch as watch_module
from kvcache_otel.events.source import parse
from tests.events.fake_peer import greet, memory, message, on_the_wire, tcp_server
from tests.events.fake_publisher import MEDIUM, RANK, TYPE, Driven, FakePublisher, frame, traffic
from tests.events.payloads import batch, stored
from tests.support.processes import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what waits inside ZeroMQ is known on Linux alone")

MIB = 2**20


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven()
    yield driven
    driven.close()


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [text for text in caplog.messages if all(word in text for word in words)]


class Sent:
    """How often a peer was connected to, and what it got rid of, one number for each time.

    It is as fast as it can be, but for one thing: between two looks of ours it sends no more than could come in the
    time that is meant to be between them. How late a look is depends on what else this machine has to do.
    """

    def __init__(self, driven: Driven | None = None, between: int = 150 * MIB) -> None:
        """Args:
        driven: Whose looks it waits for; None for nobody's.
        between: Bytes that it sends between two of them.
        """
        self.bytes: list[int] = []
        self._driven, self._between = driven, between

    def all_of(self, client: socket.socket, block: bytes, times: int) -> None:
        self.bytes.append(0)
        looks, sent = self._looks(), 0
        for _ in range(times):
            end = time.monotonic() + 30
            while self._driven is not None and sent >= self._between:
                assert time.monotonic() < end
                if self._looks() != looks:
                    looks, sent = self._looks(), 0
                else:
                    time.sleep(0.001)
            client.sendall(block)
            self.bytes[-1] += len(block)
            sent += len(block)

    def _looks(self) -> object:
        """What is another after each look."""
        watch: Any = None if self._driven is None else self._driven.watch
        return None if watch is None else watch._look_at


def endless(sent: Sent, size: int, frames: int, kind: bytes = b"PUB") -> Callable[[socket.socket], None]:
    """A message of so many frames of this size, and no last one."""
    one = on_the_wire(bytes(size), more=True)
    per_block = min(max(MIB // len(one), 1), frames)

    def serve(client: socket.socket) -> None:
        greet(client, kind)
        client.settimeout(30)
        sent.all_of(client, one * per_block, frames // per_block)
        while client.recv(1000):  # It is not we who break off.
            pass

    return serve


@contextmanager
def grown(most: int) -> Generator[None]:
    """Holds this process to growing by no more than so much."""
    before = memory(peak=False)
    Path("/proc/self/clear_refs").write_text("5")
    yield
    assert memory(peak=True) - before < most


@pytest.mark.parametrize(
    ("size", "frames", "most"),
    [(10 * MIB, 200, 500 * MIB), (MIB, 2000, 500 * MIB), (10, 10_000_000, 500 * MIB), (0, 20_000_000, 900 * MIB)],
    ids=["200 of 10 MiB", "2,000 of 1 MiB", "10,000,000 of 10 bytes", "20,000,000 empty ones"],
)
def test_a_message_of_frames_without_end_is_broken_off(
    driven: Driven, caplog: pytest.LogCaptureFixture, size: int, frames: int, most: int
) -> None:
    # Where frames are short, what ZeroMQ makes of them is much longer.
    rng, sent = random.Random(1), Sent(driven, 150 * MIB if size >= MIB else 5 * MIB)
    good = [driven.publisher() for _ in range(2)]
    with tcp_server(endless(sent, size, frames)) as port, grown(most):
        driven.want(
            f"bad=tcp://127.0.0.1:{port}", *(f"w{n}={each.endpoint}?engine=vllm" for n, each in enumerate(good))
        )
        driven.subscribed(*good)

        def broken_off() -> int | float:
            good[0].publish(*traffic(rng))
            good[1].publish(*traffic(rng))
            return driven.failures("bad").get("frame_count", 0)

        driven.until(broken_off, 60)
        driven.until(lambda: all(driven.agrees(f"w{n}", each.expected) for n, each in enumerate(good)))
        assert driven.failures("bad") == {"frame_count": 1}
    [line] = said(caplog, "'bad' is broken off", f"tcp://127.0.0.1:{port}")
    assert "20 MiB in many frames, and no whole message" in line
    assert "connected again in 1 s" in line
    assert driven.batches("w0") == driven.batches("w1") == {0: {}}
    assert driven.failures("w0") == driven.failures("w1") == {}


def test_whoever_does_it_again_and_again_is_connected_to_less_and_less(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "BROKEN_OFF_SECONDS", 0.1)
    monkeypatch.setattr(subscription_module, "LONGEST_OFF_SECONDS", 0.4)
    sent, times = Sent(), list[float]()
    serve = endless(sent, MIB, 1000)

    def timed(client: socket.socket) -> None:
        times.append(time.monotonic())
        serve(client)

    with tcp_server(timed) as port:
        driven.want(f"bad=tcp://127.0.0.1:{port}")
        driven.until(lambda: driven.failures("bad").get("frame_count", 0) >= 5, 60)
    waits = [line.rpartition("again in ")[2].split(" ")[0] for line in said(caplog, "'bad' is broken off")]
    assert waits[:5] == ["0.1", "0.2", "0.4", "0.4", "0.4"]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap > wait for gap, wait in zip(gaps, (0.1, 0.2, 0.4, 0.4), strict=False))


def test_a_whole_message_of_too_many_frames_is_read_bit_by_bit_and_its_sender_is_broken_off(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    sent, turns = Sent(), list[float]()
    whole = on_the_wire(b"x" * 3, more=True) * 300_000 + on_the_wire(b"", more=False)
    few = message(*[b"x"] * 40)

    def serve(client: socket.socket) -> None:
        greet(client)
        sent.all_of(client, few + whole, 1)
        client.settimeout(30)
        while client.recv(1000):
            pass

    good = driven.publisher()
    with tcp_server(serve) as port:
        driven.want(f"bad=tcp://127.0.0.1:{port}", f"good={good.endpoint}?engine=vllm")
        driven.subscribed(good)

        def broken_off() -> list[str]:
            good.publish(stored([len(turns)]))
            began = time.thread_time()
            driven.watch.poll(0.01)
            turns.append(time.thread_time() - began)
            return said(caplog, "'bad' is broken off", "more than 1,024 frames")

        driven.until(broken_off, 60)
        assert driven.failures("bad") == {"frame_count": 3}  # Both messages, and the break.
        driven.until(lambda: driven.agrees("good", good.expected))
    assert max(turns) < 0.5


def test_whole_messages_that_wait_are_bounded_in_bytes(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "WAITING_BYTES", 30 * MIB)
    sent = Sent()

    def serve(client: socket.socket) -> None:
        greet(client)
        sent.all_of(client, message(b"", frame(1), bytes(MIB)), 60)
        client.settimeout(30)
        while client.recv(1000):
            pass

    good = driven.publisher()
    with tcp_server(serve) as port:
        driven.want(f"bad=tcp://127.0.0.1:{port}", f"good={good.endpoint}?engine=vllm")
        driven.subscribed(good)
        _held_up(lambda: sum(sent.bytes) >= 60 * MIB)
        good.publish(stored([1]))
        driven.until(lambda: driven.agrees("good", good.expected) and said(caplog, "'bad' is broken off"))
        assert driven.failures("bad")["other"] == 1
    assert said(caplog, "'bad' is broken off", "more than 30 MiB wait to be read")


def _held_up(condition: Callable[[], object]) -> None:
    """The loop stands still until something has happened, and is inside ZeroMQ."""
    wait_until(condition, 20)
    time.sleep(0.3)


def test_long_batches_that_can_be_read_are_not_broken_off(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the longest that there may be, bit by bit, nor many while the loop is held up, nor both in turn."""
    good = driven.publisher()
    done, read = threading.Event(), threading.Event()
    longest = stored([1]) | {"token_ids": [], "more": bytes(15 * MIB)}
    many = stored([2]) | {"more": bytes(MIB)}
    number, steps = iter(range(1000)), count()

    def one(event: dict[str, Any]) -> bytes:
        return message(b"", frame(next(number)), batch(event))

    def serve(client: socket.socket) -> None:
        greet(client)
        client.settimeout(30)
        for _ in range(2):
            text = one(longest)
            for at in range(0, len(text), MIB):
                client.sendall(text[at : at + MIB])
                time.sleep(0.06)
            for _ in range(50):
                client.sendall(one(many))
            client.sendall(one(longest))
        done.set()
        read.wait(60)

    with tcp_server(serve) as port:
        driven.want(f"w=tcp://127.0.0.1:{port}", f"good={good.endpoint}")
        driven.subscribed(good)
        end = time.monotonic() + 60
        while not done.is_set() or driven.heard("w") < 104:
            assert time.monotonic() < end
            driven.step()
            time.sleep(0.4 if next(steps) % 20 == 0 else 0)
        for _ in range(20):
            driven.step()
        read.set()
    assert driven.heard("w") == 104
    assert driven.batches("w") == {0: {}}
    assert driven.failures("w") == {}
    assert not said(caplog, "broken off")


def test_we_may_be_behind_all_the_time(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "WAITING_BYTES", 40 * MIB)
    payload, heard, read = batch(stored([1]) | {"more": bytes(MIB)}), [0.0], threading.Event()

    def serve(client: socket.socket) -> None:
        greet(client)
        for number in range(200):
            client.sendall(message(b"", frame(number), payload))
            wait_until(lambda number=number: number - heard[0] < 20)
        read.wait(60)

    with tcp_server(serve) as port:
        driven.want(f"w=tcp://127.0.0.1:{port}")
        end = time.monotonic() + 60
        while heard[0] < 200:
            assert time.monotonic() < end
            driven.watch.poll(0.02)
            time.sleep(0.005)
            heard[0] = driven.heard("w")
        read.set()
    assert driven.failures("w") == {}
    assert driven.batches("w") == {0: {}}


# -- replays -----------------------------------------------------------------------------------------------------------


@contextmanager
def _replayed(driven: Driven, serve: Callable[[socket.socket], None]) -> Generator[FakePublisher]:
    """A publisher whose replay is somebody else, and one of whose batches was dropped."""
    publisher = driven.publisher()
    with tcp_server(serve) as port:
        driven.want(f"bad={publisher.endpoint}?engine=vllm&replay={port}")
        driven.subscribed(publisher)
        yield publisher


def _recovers(driven: Driven, publisher: FakePublisher) -> None:
    """What comes live is applied, and what the replay did not bring is lost."""
    publisher.publish(stored([1]))
    publisher.publish(stored([2]), drop=True)
    publisher.publish(stored([3]))
    driven.until(lambda: driven.batches("bad").get(0, {}).get("lost") == 1)
    driven.until(lambda: driven.agrees("bad", publisher.expected))


def test_an_answer_without_end_is_broken_off(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent(driven)
    with grown(500 * MIB), _replayed(driven, endless(sent, MIB, 2000, b"ROUTER")) as publisher:
        driven.until(lambda: driven.failures("bad").get("frame_count"), 60)
        assert (
            len(
                said(caplog, "'bad': its replay at tcp://", "broken off", "20 MiB in many frames, and no whole message")
            )
            == 1
        )
        _recovers(driven, publisher)
    assert max(sent.bytes) < 500 * MIB
    assert driven.failures("bad").keys() == {"frame_count"}
    assert not said(caplog, "no answer from its replay")


def test_answers_that_are_too_long_together_are_broken_off(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "REPLAYED_BYTES", 30 * MIB)
    sent = Sent()

    def serve(client: socket.socket) -> None:
        greet(client, b"ROUTER")
        sent.all_of(client, message(b"", frame(2**40), bytes(4 * MIB)), 500)

    with _replayed(driven, serve) as publisher:
        driven.until(lambda: sent.bytes)
        _held_up(lambda: sum(sent.bytes) >= 100 * MIB)
        driven.until(lambda: said(caplog, "its replay at", "is broken off", "more than 30 MiB wait"))
        _recovers(driven, publisher)
    assert driven.failures("bad")["other"] >= 1


# -- publishers that connect to us -------------------------------------------------------------------------------------


def test_of_publishers_that_connect_to_us_the_one_is_hung_up_on_that_does_it(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    port, sent, rng = free_port(), Sent(driven), random.Random(2)
    driven.want(f"any=tcp://*:{port}")
    good = driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=b"good")
    driven.until(lambda: good.subscriptions)
    client = socket.create_connection(("127.0.0.1", port))

    def attack() -> None:
        with suppress(OSError):
            endless(sent, MIB, 2000)(client)

    thread = threading.Thread(target=attack)
    with grown(500 * MIB):
        thread.start()

        def broken_off() -> list[str]:
            good.publish(*traffic(rng))
            return said(caplog, "'any' is broken off", f"tcp://*:{port}", "many frames")

        driven.until(broken_off, 60)
        [subscription] = driven.watch.subscriptions.values()
        driven.until(lambda: subscription.connections == 1)
    with suppress(OSError):  # It may not have noticed: what it is to send waits for room on our side.
        client.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    client.close()
    driven.until(lambda: driven.agrees("any/good", good.expected))
    assert driven.failures("any") == {"frame_count": 1}
    assert driven.failures("any/good") == {}
    assert driven.batches("any/good") == {0: {}}


# -- a topic that nobody sends -----------------------------------------------------------------------------------------


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "SILENT_SECONDS", 0.2)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("binds", [False, True])
def test_a_topic_that_nobody_sends_is_counted_until_somebody_does(
    driven: Driven, caplog: pytest.LogCaptureFixture, binds: bool
) -> None:
    port = free_port()
    if binds:
        driven.want(f"w=tcp://*:{port}?topic=kv@here")
    publisher = driven.publisher(topic=b"kv-events", **({"connect": f"tcp://127.0.0.1:{port}"} if binds else {}))
    if not binds:
        driven.want(f"w={publisher.endpoint}?topic=kv@here&engine=vllm")
    driven.subscribed(publisher)
    sent = 0

    def failures(at_least: int) -> Callable[[], bool]:
        def grown() -> bool:
            nonlocal sent
            publisher.send(b"kv-events", frame(sent), batch(stored([sent])))
            sent += 1
            return driven.failures("w").get("other", 0) >= at_least

        return grown

    began = time.monotonic()
    driven.until(failures(1))
    assert time.monotonic() - began > 0.15
    driven.until(failures(3))
    assert driven.failures("w") == {"other": 3}
    assert sent > 6  # Most of it does not come.
    assert (
        len(said(caplog, "'w': nothing of the topic 'kv@here' that was asked for; its publisher sends 'kv-events'"))
        == 1
    )
    assert len(said(caplog, "'w' has sent nothing of the topic 'kv@here'")) == 1
    assert not said(caplog, "cannot be read")
    assert driven.heard("w") == 0
    publisher.topic = b"kv@here/and more"
    publisher.publish(stored([7, 8]))
    name = "w/kv@here/and more" if binds else "w"
    driven.until(lambda: driven.agrees(name, publisher.expected))
    before = driven.failures("w")
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        driven.step()
        failures(0)()
    assert driven.failures("w") == before
    assert driven.agrees(name, publisher.expected)
    assert publisher.subscriptions.count(b"\x01") == publisher.subscriptions.count(b"\x00") > 0


@pytest.mark.usefixtures("_impatient")
def test_an_idle_engine_is_no_failure(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    idle, right = driven.publisher(topic=b"kv"), driven.publisher(topic=b"kv")
    driven.want(f"idle={idle.endpoint}?topic=kv", f"none={right.endpoint}")
    driven.subscribed(idle, right)
    driven.until(
        lambda: said(caplog, "'idle' has sent nothing of the topic 'kv'", "idle") and said(caplog, "'none' has")
    )
    for _ in range(30):
        driven.step()
    assert driven.failures("idle") == driven.failures("none") == {}
    idle.publish(stored([1]))
    driven.until(lambda: driven.agrees("idle", idle.expected))
    driven.until(lambda: idle.subscriptions[-1] == b"\x00")
    assert driven.failures("idle") == {}


@pytest.mark.usefixtures("_impatient")
def test_what_zeromq_has_looked_ahead_at_is_not_applied_when_the_topic_is_not_wanted_any_more(driven: Driven) -> None:
    publisher = driven.publisher(topic=b"other")
    driven.want(f"w={publisher.endpoint}?topic=kv")
    driven.until(lambda: b"\x01" in publisher.subscriptions)
    for _ in range(5):
        publisher.publish(stored([1]))
    subscription: Any = driven.watch.subscriptions[parse(f"w={publisher.endpoint}?topic=kv")]
    assert subscription._inlet.socket.poll(1000)
    subscription._probe(False)
    for _ in range(5):
        driven.step()
    assert driven.heard("w") == 0
    assert driven.failures("w") == {"other": 1}


def test_blocks_without_end_are_forgotten(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "MOST_BLOCKS", 1000)
    monkeypatch.setattr(watch_module, "BOUND_SECONDS", 0.1)
    endless, good = driven.publisher(), driven.publisher()
    driven.want(f"bad={endless.endpoint}?engine=sglang", f"good={good.endpoint}?engine=vllm")
    driven.subscribed(endless, good)
    good.publish(stored(list(range(100))))
    blocks = count()

    def forgotten() -> list[str]:
        endless.publish(stored([next(blocks) for _ in range(100)]), rank=next(blocks) % 8)
        return said(caplog, "worker 'bad' has", "in medium 'device'", "are forgotten")

    driven.until(forgotten)
    driven.until(lambda: driven.agrees("good", good.expected))
    [dropped] = [point.value for point in driven.recorder.points(semconv.TELEMETRY_DROPPED) if point.value]
    assert dropped > 900
    held = sum(driven.resident("bad").values())
    stored_ = driven.rows(semconv.EVENT_BLOCKS, RANK, TYPE, MEDIUM, worker="bad")
    assert held + dropped == sum(value for (_, kind, _), value in stored_.items() if kind == "block_stored")


def test_numbers_that_make_no_sense_do_not_fill_the_log(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    publisher = driven.publisher()
    driven.want(f"bad={publisher.endpoint}")
    driven.subscribed(publisher)
    for number in range(300):
        publisher.send(f"{number % 100}".encode(), frame(0), batch(stored([number])))
        publisher.send(f"{number % 100}".encode(), frame(9), batch(stored([number])))
    driven.until(lambda: driven.batches("bad").get(0, {}).get("resets", 0) == 200)
    driven.until(lambda: driven.batches("bad").get(0, {}).get("lost", 0) >= 100)
    lines = said(caplog, "started again") + said(caplog, "batches lost so far")
    assert len(lines) == 10
    assert len(said(caplog, "(no more of its batches for a minute)")) == 1


def test_a_storm_of_connections_without_a_word_is_counted(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    port, storm = free_port(), 200
    driven.want(f"any=tcp://*:{port}")
    good = driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=b"good")
    driven.until(lambda: good.subscriptions)
    for number in range(storm):
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            if number % 2:  # Gone at once, or when it has been greeted.
                client.recv(1)
        driven.step(0)
    driven.until(lambda: driven.failures("any") == {"other": storm})
    good.publish(stored([1]))
    driven.until(lambda: driven.agrees("any/good", good.expected))
    [subscription] = driven.watch.subscriptions.values()
    driven.until(lambda: subscription.connections == 1)
    assert driven.failures("any") == {"other": storm}
    assert driven.failures("any/good") == {}
    assert len(said(caplog, "'any' sends what cannot be read (other)", "a connection ended before")) == 1
    assert len(said(caplog, "'any'")) < 2 * subscription_module.LINES


def test_a_door_that_is_shut_at_once_is_counted(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    shut = list[float]()
    with tcp_server(lambda client: shut.append(time.monotonic())) as port:
        driven.want(f"w=tcp://127.0.0.1:{port}")
        driven.until(lambda: driven.failures("w").get("other", 0) >= 4)
        assert driven.failures("w").keys() == {"other"}
    driven.until(lambda: driven.failures("w")["other"] >= len(shut))
    assert driven.failures("w")["other"] <= len(shut) + 1, "one may have come to a door that was not there any more"
    assert len(said(caplog, "'w' sends what cannot be read (other)", "a connection ended before")) == 1


_STORM = """
import socket, struct, sys
from kvcache_otel.events.source import parse
from tests.events.fake_publisher import Driven

driven, port = Driven(), int(sys.argv[1])
driven.want(f"x=tcp://*:{port}")
for _ in range(2000):
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
with socket.create_connection(("127.0.0.1", port), 10) as client:
    client.settimeout(5)
    try:
        print("greeted" if client.recv(1) else "hung up", flush=True)
    except TimeoutError:
        print("ZeroMQ waits for us", flush=True)
driven.want()
print("ended", flush=True)
driven.close()
"""


def test_connections_that_come_and_go_while_nobody_looks_hold_nothing_up() -> None:
    # In a process of its own: one that hangs there can only be killed.
    process = subprocess.Popen(
        [sys.executable, "-c", _STORM, str(free_port())],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        out = process.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        out = process.communicate()[0]
    assert (out.split("\n"), process.returncode) == (["greeted", "ended", ""], 0)
