"""Names of hosts, by a resolver that a test answers for: one that is slow, moves or lies stops no other source."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.events import names as names_module
from kvcache_otel.events.names import Names, host_of, is_named
from tests.events.fake_publisher import Driven
from tests.events.payloads import stored
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeResolver:
    """Answers what it is told to; a name whose answer is an event is not answered before that is set."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[str, ...] | Exception | threading.Event] = {}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> tuple[str, ...]:
        self.asked.append(host)
        answer = self.answers[host]
        if isinstance(answer, threading.Event):
            answer.wait(30)
            answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        assert not isinstance(answer, threading.Event)
        return answer


@pytest.fixture
def resolver() -> FakeResolver:
    return FakeResolver()


@pytest.fixture
def driven(resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    monkeypatch.setattr(names_module, "HOLDS_SECONDS", 0.05)
    driven = Driven()
    watch: Any = driven.watch
    watch._names = Names(resolver)
    yield driven
    driven.close()


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [message for message in caplog.messages if all(word in message for word in words)]


def test_a_name_that_is_not_answered_stops_no_other(
    driven: Driven, resolver: FakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    late = threading.Event()
    slow, good, plain = (driven.publisher(rank=rank) for rank in range(3))
    resolver.answers = {"slow.test": late, "good.test": ("127.0.0.1",)}
    driven.want(
        f"slow=tcp://slow.test:{slow.port}?engine=vllm",
        f"good=tcp://good.test:{good.port}?engine=vllm",
        f"plain={plain.endpoint}?engine=vllm",
    )
    driven.subscribed(good, plain)
    for number in range(50):
        good.publish(stored([number]))
        plain.publish(stored([number]))
    driven.until(lambda: driven.agrees("good", good.expected, 1) and driven.agrees("plain", plain.expected, 2))
    assert driven.watch.states()["slow", None] == "down"
    assert said(caplog, "'slow'") == []
    resolver.answers["slow.test"] = ("127.0.0.1",)
    late.set()
    driven.subscribed(slow)
    slow.publish(stored([1]))
    driven.until(lambda: driven.agrees("slow", slow.expected, 0))
    assert len(said(caplog, "'slow' is connected at tcp://slow.test:")) == 1


def test_a_name_that_is_unknown_is_said_once_and_tried_again(
    driven: Driven, resolver: FakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = driven.publisher()
    resolver.answers = {"h.test": OSError("no such name")}
    driven.want(f"w=tcp://h.test:{publisher.port}?engine=vllm")
    driven.until(lambda: resolver.asked.count("h.test") >= 4)
    assert said(caplog, "'w'") == ["kvcache: source 'w' cannot be resolved: no such name; it is tried again and again"]
    resolver.answers = {"h.test": ("127.0.0.1",)}
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.agrees("w", publisher.expected))


def test_a_publisher_that_moves_is_followed_and_keeps_its_rows(driven: Driven, resolver: FakeResolver) -> None:
    resolver.answers = {"h.test": ("127.0.0.1",)}
    before = driven.publisher()
    driven.want(f"w=tcp://h.test:{before.port}?engine=vllm")
    driven.subscribed(before)
    for number in range(3):
        before.publish(stored([number]))
    driven.until(lambda: driven.agrees("w", before.expected))
    port = before.port
    driven.drop(before)
    resolver.answers = {"h.test": ("127.0.0.9",)}  # Nobody is there yet, nor where it was.
    driven.until(lambda: driven.watch.states() == {("w", 0): "down"})
    [subscription] = driven.watch.subscriptions.values()
    driven.until(lambda: subscription.endpoint == f"tcp://127.0.0.9:{port}")
    after = driven.publisher(port=port)
    resolver.answers = {"h.test": ("127.0.0.1",)}
    driven.subscribed(after)
    after.publish(stored([7]))
    driven.until(lambda: driven.batches("w") == {0: {"resets": 1}})
    assert driven.resident("w") == {(0, "device"): 1}


def test_of_many_addresses_the_one_that_answers_is_found_and_kept(driven: Driven, resolver: FakeResolver) -> None:
    publisher = driven.publisher()
    resolver.answers = {"h.test": ("::1", "127.0.0.3", "127.0.0.1")}
    driven.want(f"w=tcp://h.test:{publisher.port}?engine=vllm")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.agrees("w", publisher.expected))
    resolver.answers = {"h.test": ("127.0.0.3", "::1", "127.0.0.1")}  # In another order, as name servers do.
    for _ in range(20):
        driven.step()
    publisher.publish(stored([2]))
    driven.until(lambda: driven.agrees("w", publisher.expected))
    assert len(publisher.subscriptions) == 1


def test_a_replay_with_a_name_is_where_its_publisher_is(driven: Driven, resolver: FakeResolver) -> None:
    late = threading.Event()
    publisher = driven.publisher(replay="new", rank=1)
    for number in range(10):
        publisher.publish(stored([number]))
    resolver.answers = {"h.test": ("127.0.0.3", "127.0.0.1"), "r.test": late}
    driven.want(f"w=tcp://h.test:{publisher.port}?engine=vllm&replay=tcp://r.test:{publisher.replay_port}")
    driven.subscribed(publisher)
    assert driven.resident("w") == {}
    resolver.answers["r.test"] = ("127.0.0.3", "127.0.0.1")
    late.set()
    driven.until(lambda: driven.agrees("w", publisher.published, 1))


def test_no_more_are_looked_up_at_a_time_than_may_be(resolver: FakeResolver) -> None:
    late, names = threading.Event(), Names(resolver)
    hosts = [f"h{n}.test" for n in range(names_module.MOST_AT_ONCE + 5)]
    resolver.answers = dict.fromkeys(hosts, late)
    for _ in range(2):
        assert {names.of(f"tcp://{host}:1") for host in hosts} == {()}
    wait_until(lambda: len(resolver.asked) >= names_module.MOST_AT_ONCE)  # Their threads begin when they can.
    assert sorted(resolver.asked) == sorted(hosts[: names_module.MOST_AT_ONCE])
    resolver.answers = dict.fromkeys(hosts, ("127.0.0.1",))
    late.set()
    wait_until(lambda: all(names.of(f"tcp://{host}:1") == ("tcp://127.0.0.1:1",) for host in hosts))
    assert sorted(resolver.asked) == sorted(hosts)  # An answer holds for a while.


def test_an_answer_holds_until_there_is_another(resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "HOLDS_SECONDS", 0.0)
    names = Names(resolver)
    resolver.answers = {"h": ("127.0.0.1",)}
    wait_until(lambda: names.of("tcp://h:1") == ("tcp://127.0.0.1:1",))
    resolver.answers = {"h": OSError("not now")}
    wait_until(lambda: names.of("tcp://h:1") and names.problem("tcp://h:1") == "not now")
    assert names.of("tcp://h:1") == ("tcp://127.0.0.1:1",)
    resolver.answers = {"h": ("fe80::1",)}
    wait_until(lambda: names.of("tcp://h:1") == ("tcp://[fe80::1]:1",))
    assert names.problem("tcp://h:1") == ""


def test_the_system_resolver() -> None:
    names = Names()
    wait_until(lambda: names.of("tcp://localhost:5557"))
    assert set(names.of("tcp://localhost:5557")) <= {"tcp://127.0.0.1:5557", "tcp://[::1]:5557"}
    assert names.of("tcp://nobody.invalid:1") == ()


@pytest.mark.parametrize(
    ("endpoint", "named"),
    [
        ("tcp://127.0.0.1:1", False),
        ("tcp://[::1]:1", False),
        ("tcp://[fe80::1%eth0]:1", False),
        ("tcp://*:1", False),
        ("ipc:///tcp://h:1", False),
        ("tcp://localhost:1", True),
        ("tcp://a.b:1", True),
    ],
)
def test_what_has_to_be_looked_up(endpoint: str, named: bool) -> None:
    assert is_named(endpoint) is named
    assert host_of("tcp://[::1]:1") == "::1"
    if not named:
        assert Names(lambda *_: pytest.fail("asked")).of(endpoint) == (endpoint,)
