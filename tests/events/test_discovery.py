"""Which sources there are: a file that changes, names that resolve to many; whatever is wrong, the others stay."""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kvcache_otel.events import discovery as discovery_module
from kvcache_otel.events.discovery import LARGEST_FILE, MISSED, MOST_SOURCES, UNFINISHED, UNSETTLED, Discovery
from kvcache_otel.events.few import FEW
from kvcache_otel.events.names import MOST_AT_ONCE
from kvcache_otel.events.source import Source, parse
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

A, B, C = "a=tcp://10.0.0.1:1", "b=tcp://10.0.0.2:2", "c=tcp://10.0.0.3:3"


class FakeResolver:
    """Answers with what a test says; an exception is raised, and an event is waited for.

    Attributes:
        answers: By host.
        asked: Hosts, in the order in which they were asked for.
    """

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Iterable[str]:
        assert port == 7
        self.asked.append(host)
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, threading.Event):
            assert answer.wait(30)
            return []
        assert isinstance(answer, list)
        return iter(answer)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sources.txt"


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def sources(*texts: str) -> tuple[Source, ...]:
    return tuple(map(parse, texts))


def changed(discovery: Discovery, file: Path, content: str | bytes) -> None:
    """Writes the file, and looks until it is taken over."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    for _ in range(2 if file.read_bytes().endswith(b"\n") else UNFINISHED):
        discovery.look(names=False)


def many(resolver: FakeResolver, *texts: str) -> Discovery:
    """Names that have been resolved once."""
    discovery = Discovery(sources(*texts), None, resolve=resolver)
    discovery.look(names=True)
    return discovery


def names(discovery: Discovery) -> list[str]:
    return [source.name for source in discovery.found]


# -- a file ------------------------------------------------------------------------------------------------------------


def test_a_file_that_changes(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"# comment\n\n{A}\n   {B}   # trailing\n#{C}\n")
    discovery = Discovery(sources(C), file)
    assert discovery.found == sources(C, A, B)
    changed(discovery, file, f"{A}\n")
    assert discovery.found == sources(C, A)
    changed(discovery, file, f"{A}?engine=vllm\n{B}\r\n")
    assert discovery.found == sources(C, f"{A}?engine=vllm", B)
    changed(discovery, file, "# none\n")
    assert discovery.found == sources(C)
    assert caplog.messages == []
    assert discovery.problems == []


def test_what_does_not_change_is_the_same_object(file: Path) -> None:
    file.write_text(A)
    discovery = Discovery((), file)
    found = discovery.found
    changed(discovery, file, f"{A}\n# nothing new")
    assert discovery.found is found


def test_a_file_that_is_about_to_be_written_takes_nothing_away(file: Path) -> None:
    file.write_text(f"{A}\n{B}\n")
    discovery = Discovery((), file)
    for half in ("", f"{A}\n", f"{A}\n{B}\n{C[:9]}"):
        file.write_text(half)
        discovery.look(names=False)
        assert discovery.found == sources(A, B)
    file.write_text(f"{A}\n{B}\n{C}\n")
    discovery.look(names=False)
    discovery.look(names=False)
    assert discovery.found == sources(A, B, C)
    file.write_text("")
    discovery.look(names=False)
    file.write_text(f"{A}\n{B}\n{C}\n")
    discovery.look(names=False)
    file.write_text("")
    discovery.look(names=False)
    assert discovery.found == sources(A, B, C)


def test_a_line_that_is_half_written_is_not_taken_until_nobody_writes_any_more(file: Path) -> None:
    file.write_text(f"{A}\n")
    discovery = Discovery((), file)
    whole = f"{A}\nb=tcp://10.0.0.2:5557\n"
    file.write_text(whole[:-3])
    for _ in range(UNFINISHED - 1):
        discovery.look(names=False)
        assert discovery.found == sources(A)
    file.write_text(whole[:-1])  # It is as good as new.
    for _ in range(UNFINISHED - 1):
        discovery.look(names=False)
        assert discovery.found == sources(A)
    discovery.look(names=False)
    assert discovery.found == sources(A, "b=tcp://10.0.0.2:5557")
    file.write_text(f"{A}\n")
    discovery.look(names=False)
    discovery.look(names=False)
    assert discovery.found == sources(A), "a whole line needs two looks"


def test_a_half_written_line_whose_file_is_touched_again_is_waited_for(file: Path) -> None:
    file.write_text(f"{A}\n")
    discovery = Discovery((), file)
    file.write_text(B)
    for look in range(2 * UNFINISHED):
        os.utime(file, (look, look))
        discovery.look(names=False)
        assert discovery.found == sources(A)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b" \n\n", "it is empty"),
        (b"a=tdp://10.0.0.1:5557\n", "not one of its lines is a source: "),
        (b"\0" * 100, "cannot be read: there are zero bytes in it"),
        (f"{B}\n".encode("utf-16"), "cannot be read: it is UTF-16, and not UTF-8"),
        (f"{B}\n".encode("utf-16-le"), "cannot be read: there are zero bytes in it"),
    ],
)
def test_a_file_in_which_there_is_nothing_any_more_is_said_and_takes_nothing_away(
    file: Path, caplog: pytest.LogCaptureFixture, content: bytes, why: str
) -> None:
    file.write_text(f"{A}\n")
    discovery = Discovery((), file)
    file.write_bytes(content)
    for _ in range(2 * UNFINISHED):
        discovery.look(names=False)
        assert discovery.found == sources(A)
    [said] = caplog.messages
    assert said.startswith(f"kvcache: the sources in {str(file)!r} stay, since ")
    assert why in said
    assert discovery.problems == [said.removeprefix("kvcache: ")]
    assert discovery.complaints == 1
    changed(discovery, file, f"{A}\n")
    assert (discovery.found, discovery.problems) == (sources(A), [])
    file.write_bytes(content)
    discovery.look(names=False)
    discovery.look(names=False)
    changed(discovery, file, f"{B}\n")
    assert (discovery.found, discovery.problems) == (sources(B), [])


def test_an_address_that_is_not_in_every_answer_stays(caplog: pytest.LogCaptureFixture) -> None:
    resolver = FakeResolver(pods=["10.0.0.1", "10.0.0.2"])
    discovery = many(resolver, "p=dns+tcp://pods:7")
    found = discovery.found
    for look in range(4 * MISSED):
        resolver.answers["pods"] = ["10.0.0.2"] if look % MISSED else ["10.0.0.1"]
        discovery.look(names=True)
        assert discovery.found is found
    assert caplog.messages == []


def test_a_file_with_the_time_in_it_is_taken_over(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(A)
    discovery = Discovery((), file)
    for look in range(10):
        file.write_text(f"# written at {look}\n{A}\n{B}\n")
        discovery.look(names=False)
        assert discovery.found == (sources(A, B) if look else sources(A))
    assert caplog.messages == []


def test_a_file_of_other_sources_at_every_look_is_said(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(A)
    discovery = Discovery((), file)
    for look in range(10):
        file.write_text(f"{A}\nb=tcp://10.0.0.2:{look + 1}\n")
        discovery.look(names=False)
        assert discovery.found == sources(A)
        assert bool(discovery.problems) is (look >= UNSETTLED - 1)
    assert caplog.messages == [f"kvcache: the sources in {str(file)!r} stay, since there are others at every look"]
    discovery.look(names=False)
    assert discovery.found == sources(A, "b=tcp://10.0.0.2:10")
    assert discovery.problems == []


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_a_source(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + A.encode())
    assert Discovery((), file).found == sources(A)


def test_a_source_that_is_there_twice_is_there_once_and_is_said(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"{A}\n{A}?engine=vllm\nother=tcp://10.0.0.1:1\nb=tcp://10.0.0.2:2?engine=sglang\n")
    discovery = Discovery(sources(A, f"{B}?engine=vllm"), file)
    assert discovery.found == sources(A, f"{B}?engine=vllm", "other=tcp://10.0.0.1:1")
    same, other, engine = (message.removeprefix("kvcache: ") for message in caplog.messages)
    assert same == "source 'a' is there twice at tcp://10.0.0.1:1, in the same words; the later one is left out"
    assert "with engine=vllm where it had engine=auto" in other
    assert "with engine=sglang where it had engine=vllm" in engine
    assert discovery.problems == [same, other, engine]
    assert discovery.complaints == 3
    for _ in range(3):
        discovery.look(names=True)
    assert discovery.complaints == 3
    changed(discovery, file, "# none\n")
    assert discovery.problems == []
    changed(discovery, file, f"{A}\n")
    assert len(caplog.messages) == discovery.complaints == 4, "it is said again when it is there again"


def test_sources_of_one_name_that_contradict_each_other(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("p=tcp://h:1\np=tcp://h:2?engine=vllm\np=tcp://h:3?engine=sglang\n")
    discovery = Discovery((), file)
    assert discovery.found == sources("p=tcp://h:1?engine=vllm", "p=tcp://h:2?engine=vllm")
    [said] = caplog.messages
    assert "source 'p' at tcp://h:3 has engine=sglang, and at tcp://h:2 engine=vllm" in said
    assert said.endswith("; the later one is left out")


def test_names_that_resolve_to_the_same_contradict_each_other(caplog: pytest.LogCaptureFixture) -> None:
    resolver = FakeResolver(one=["10.0.0.1", "10.0.0.2"], two=["10.0.0.2"])
    discovery = many(resolver, "p=dns+tcp://one:7?engine=vllm", "p=dns+tcp://two:7")
    assert names(discovery) == ["p/10.0.0.1:7", "p/10.0.0.2:7"]
    assert {source.engine for source in discovery.found} == {"vllm"}, "what one says holds for all of its name"
    [said] = caplog.messages
    assert "source 'p/10.0.0.2:7' is there twice at tcp://10.0.0.2:7, in the same words" in said


def test_ten_thousand_contradictions_are_not_as_many_lines(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("\n".join([A, *(f"{A}?block_size={size}" for size in range(1, 10_001))]))
    discovery = Discovery((), file)
    assert discovery.found == sources(A)
    assert len(caplog.messages) == FEW + 1
    assert caplog.messages[-1] == f"kvcache: {10_000 - FEW} more sources contradict others, and are left out"
    assert discovery.complaints == 10_000


def _vanish(file: Path) -> None:
    file.unlink()


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _huge(file: Path) -> None:
    file.write_bytes(b"#" * (LARGEST_FILE + 1))


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


SPOILED = [
    (_vanish, "No such file"),
    (_directory, "it is not a regular file"),
    (_huge, f"it is larger than {LARGEST_FILE} bytes"),
    (_pipe, "it is not a regular file"),
]


@pytest.mark.parametrize(("spoil", "why"), SPOILED)
def test_a_file_that_cannot_be_read_leaves_the_sources_as_they_were(
    file: Path, caplog: pytest.LogCaptureFixture, spoil: object, why: str
) -> None:
    file.write_text(A)
    discovery = Discovery((), file)
    assert callable(spoil)
    spoil(file)
    for _ in range(5):
        discovery.look(names=False)
    assert discovery.found == sources(A)
    [said] = caplog.messages
    assert said.startswith(f"kvcache: the sources in {str(file)!r} stay, since it cannot be read: ")
    assert why in said
    assert discovery.problems == [said.removeprefix("kvcache: ")]
    if file.is_dir():
        file.rmdir()
    elif file.exists():
        file.unlink()
    changed(discovery, file, B)
    assert discovery.found == sources(B)
    assert discovery.problems == []


@pytest.mark.parametrize(("spoil", "why"), SPOILED)
def test_a_file_that_cannot_be_read_at_first(
    file: Path, caplog: pytest.LogCaptureFixture, spoil: object, why: str
) -> None:
    file.write_text(A)
    assert callable(spoil)
    spoil(file)
    discovery = Discovery(sources(C), file)
    assert discovery.found == sources(C)
    [said] = caplog.messages
    assert said.startswith(f"kvcache: there are no sources in {str(file)!r}, since it cannot be read: ")
    assert why in said


def test_a_byte_that_is_not_utf_8_takes_its_line_alone_away(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_bytes(A.encode() + b"\n# \xe4, in a comment\n\xe4=tcp://h:1\n" + B.encode() + b" # \xff\n")
    discovery = Discovery((), file)
    assert discovery.found == (*sources(A), *sources(B))
    [said] = caplog.messages
    number = len(A.splitlines()) + (3 if A.endswith("\n") else 2)
    assert f"line {number}: source '?=tcp://h:1': there is something in it that cannot be printed" in said


def test_bad_lines_take_nothing_else_away_and_are_said_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"{A}\nnonsense\n{B}\n")
    discovery = Discovery((), file)
    assert discovery.found == sources(A, B)
    for _ in range(5):
        discovery.look(names=False)
    [said] = caplog.messages
    assert said.startswith(f"kvcache: {str(file)!r}, line 2: source 'nonsense': it must be [name=]tcp://host:port")
    changed(discovery, file, f"nonsense\n{A}\nworse\nstill worse\n")
    assert discovery.found == sources(A)
    assert len(caplog.messages) == discovery.complaints == 4
    for said, part in zip(
        caplog.messages[1:], ("1: source 'nonsense'", "3: source 'worse'", "4: source 'still"), strict=True
    ):
        assert f", line {part}" in said
    changed(discovery, file, A)
    assert discovery.problems == []


def test_a_file_of_nothing_but_bad_lines_is_soon_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_bytes(b"x\n" * 20_000)
    discovery = Discovery(sources(A), file)
    assert discovery.found == sources(A)
    assert [f", line {number}: source 'x'" in said for number, said in enumerate(caplog.messages[:10], 1)] == [
        True
    ] * 10
    assert caplog.messages[10:] == [f"kvcache: {str(file)!r}, 19990 more lines are no sources"]
    assert discovery.complaints == 20_000


def test_there_is_a_limit(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"tcp://h:{port}" for port in range(1, MOST_SOURCES + 11)]
    file.write_text("\n".join(lines))
    discovery = Discovery((), file)
    found = discovery.found
    assert found == sources(*lines[:MOST_SOURCES])
    discovery.look(names=False)
    assert discovery.found is found
    [said] = caplog.messages
    assert said == (
        f"kvcache: there are {MOST_SOURCES + 10} sources; those after the first {MOST_SOURCES} are left out"
    )
    changed(discovery, file, A)
    assert discovery.found == sources(A)
    assert discovery.problems == []


def test_names_beyond_the_limit_are_not_looked_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "MOST_SOURCES", 3)
    file.write_text("\n".join([A, *(f"{host}=dns+tcp://{host}:7" for host in "pqrst")]))
    resolver = FakeResolver(p=["10.0.1.1", "10.0.1.2"], q=["10.0.1.3"])
    discovery = Discovery((), file, resolve=resolver)
    discovery.look(names=True)
    assert sorted(resolver.asked) == ["p", "q"]
    assert names(discovery) == ["a", "p/10.0.1.1:7", "p/10.0.1.2:7"]
    assert discovery.problems == ["there are 7 sources; those after the first 3 are left out"]


def test_looks_that_find_nothing_new_add_nothing_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"{A}\np=dns+tcp://pods:7\n")
    resolver = FakeResolver(pods=["10.0.0.1"])
    discovery = Discovery((), file, resolve=resolver)
    discovery.look(names=True)
    with monkeypatch.context() as patch:
        patch.setattr(discovery_module, "agree", lambda _: pytest.fail("nothing has changed"))
        for _ in range(3):
            discovery.look(names=True)
    resolver.answers["pods"] = ["10.0.0.2"]
    for _ in range(MISSED):
        discovery.look(names=True)
    assert names(discovery) == ["a", "p/10.0.0.2:7"]


# -- names that resolve to many ----------------------------------------------------------------------------------------


def test_a_name_resolves_to_many_to_others_and_to_none(caplog: pytest.LogCaptureFixture) -> None:
    resolver = FakeResolver(pods=["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"])
    discovery = many(resolver, "p=dns+tcp://pods:7?replay=8&engine=vllm", A)
    three = sources(
        "p/10.0.0.1:7=tcp://10.0.0.1:7?replay=8&engine=vllm",
        "p/10.0.0.2:7=tcp://10.0.0.2:7?replay=8&engine=vllm",
        "p/[fd00::1]:7=tcp://[fd00::1]:7?replay=8&engine=vllm",
    )
    assert discovery.found == (*three, *sources(A))
    resolver.answers["pods"] = ["10.0.0.2"]
    discovery.look(names=False)
    assert discovery.found == (*three, *sources(A))
    for _ in range(MISSED - 1):
        discovery.look(names=True)
        assert discovery.found == (*three, *sources(A))
    discovery.look(names=True)
    assert discovery.found == (three[1], *sources(A))
    assert caplog.messages == []
    resolver.answers["pods"] = []
    for _ in range(MISSED):
        assert discovery.found == (three[1], *sources(A))
        discovery.look(names=True)
    assert discovery.found == sources(A)
    assert caplog.messages == ["kvcache: source 'p' resolves to nothing"]


def test_a_name_that_cannot_be_resolved_keeps_what_it_was(caplog: pytest.LogCaptureFixture) -> None:
    resolver = FakeResolver(pods=["10.0.0.1"], others=["10.0.0.9"])
    discovery = many(resolver, "p=dns+tcp://pods:7", "o=dns+tcp://others:7")
    resolver.answers["pods"] = socket.gaierror(-2, "Name or service not known")
    resolver.answers["others"] = ["10.0.0.8"]
    for _ in range(MISSED + 1):
        discovery.look(names=True)
    assert names(discovery) == ["p/10.0.0.1:7", "o/10.0.0.8:7"]
    assert caplog.messages == ["kvcache: source 'p' cannot be resolved: [Errno -2] Name or service not known"]
    resolver.answers["pods"] = ["10.0.0.3"]
    for _ in range(MISSED):
        discovery.look(names=True)
    assert names(discovery) == ["p/10.0.0.3:7", "o/10.0.0.8:7"]
    assert discovery.problems == []


@pytest.mark.parametrize("error", [UnicodeError("label too long"), ValueError("odd"), OSError("no network")])
def test_whatever_the_resolver_raises_the_others_stay(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    discovery = many(FakeResolver(pods=error), "p=dns+tcp://pods:7", A)
    assert discovery.found == sources(A)
    assert caplog.messages == [f"kvcache: source 'p' cannot be resolved: {error}"]


def test_problems_of_sources_that_share_a_name_or_have_an_odd_one_do_not_mix(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(f"{A}\nnonsense")
    resolver = FakeResolver(bad=OSError("gone"), good=["10.0.0.1"])
    odd = ("file", "lines", "sources", "look", "twice")
    texts = [f"{name}=dns+tcp://bad:7" for name in odd] + ["twice=dns+tcp://good:7"]
    discovery = Discovery(sources(*texts), file, resolve=resolver)
    for _ in range(4):
        discovery.look(names=True)
    assert len(caplog.messages) == len(set(caplog.messages)) == len(odd) + 1
    assert len(discovery.problems) == len(odd) + 1


def test_problems_end_with_their_source(file: Path) -> None:
    file.write_text("p=dns+tcp://bad:7")
    discovery = Discovery((), file, resolve=FakeResolver(bad=OSError("gone")))
    discovery.look(names=True)
    assert len(discovery.problems) == 1
    changed(discovery, file, A)
    assert discovery.problems == []


def test_a_name_in_a_file_is_resolved_when_it_appears_and_not_at_every_look(file: Path) -> None:
    file.write_text(A)
    resolver = FakeResolver(pods=["10.0.0.1"])
    discovery = Discovery((), file, resolve=resolver)
    changed(discovery, file, "p=dns+tcp://pods:7")
    discovery.look(names=False)
    assert names(discovery) == ["p/10.0.0.1:7"]
    assert resolver.asked == ["pods"]


def test_many_names_that_cannot_be_resolved_are_not_as_many_lines(caplog: pytest.LogCaptureFixture) -> None:
    hosts = [f"h{number}" for number in range(500)]
    resolver = FakeResolver(**dict.fromkeys(hosts, OSError("gone")), good=["10.0.0.1"])
    discovery = many(resolver, *(f"{host}=dns+tcp://{host}:7" for host in (*hosts, "good")))
    assert names(discovery) == ["good/10.0.0.1:7"]
    assert len(caplog.messages) == FEW + 1
    assert caplog.messages[-1] == f"kvcache: {500 - FEW} more sources are not resolved"
    assert discovery.complaints == len(discovery.problems) == 500


def test_the_system_resolver() -> None:
    discovery = Discovery(sources("l=dns+tcp://localhost:7"), None)
    discovery.look(names=True)
    assert set(names(discovery)) & {"l/127.0.0.1:7", "l/[::1]:7"}


# -- in its thread -----------------------------------------------------------------------------------------------------


def test_a_resolver_that_hangs_holds_up_nobody(file: Path) -> None:
    never = threading.Event()
    resolver = FakeResolver(slow=never, pods=["10.0.0.1"])
    file.write_text(B)
    discovery = Discovery(
        sources("s=dns+tcp://slow:7", "p=dns+tcp://pods:7", A),
        file,
        file_seconds=0.01,
        names_seconds=0.05,
        resolve=resolver,
    )
    assert discovery.found == sources(A, B)
    discovery.start()
    try:
        wait_until(lambda: names(discovery) == ["p/10.0.0.1:7", "a", "b"])
        assert "slow" in resolver.asked
        file.write_text(C)  # Neither the file nor the others wait for it, then or later.
        resolver.answers["pods"] = ["10.0.0.2"]
        wait_until(lambda: names(discovery) == ["p/10.0.0.2:7", "a", "c"])
        assert resolver.asked.count("slow") == 1, "it is not asked again while it is"
    finally:
        discovery.stop()
        never.set()


def test_no_more_names_are_looked_up_at_a_time_than_may_be() -> None:
    never, asked, most = threading.Event(), list[str](), list[int]()

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        most.append(sum(thread.name == "kvcache-otel-name" for thread in threading.enumerate()))
        assert never.wait(30)
        return ["10.0.0.1"]

    before = sum(thread.name == "kvcache-otel-name" for thread in threading.enumerate())
    texts = [f"{number}=dns+tcp://h{number}:7" for number in range(MOST_AT_ONCE + 20)]
    discovery = Discovery(sources(*texts), None, file_seconds=0.01, resolve=resolve)
    discovery.start()
    try:
        wait_until(lambda: len(asked) == MOST_AT_ONCE)
        never.set()
        wait_until(lambda: len(discovery.found) == len(texts))
        assert max(most) - before <= MOST_AT_ONCE
        assert len(asked) == len(set(asked)) == len(texts)
    finally:
        discovery.stop()


def test_it_looks_again_and_again_and_stops(file: Path) -> None:
    file.write_text(A)
    resolver = FakeResolver(pods=["10.0.0.1"])
    discovery = Discovery(sources("p=dns+tcp://pods:7"), file, file_seconds=0.005, names_seconds=0.02, resolve=resolver)
    discovery.start()
    wait_until(lambda: names(discovery) == ["p/10.0.0.1:7", "a"])
    resolver.answers["pods"] = ["10.0.0.2"]
    file.write_text(B)
    wait_until(lambda: names(discovery) == ["p/10.0.0.2:7", "b"])
    discovery.stop()
    wait_until(lambda: not any(thread.name == "kvcache-otel-discovery" for thread in threading.enumerate()))


def test_a_look_that_fails_is_said_once_and_is_not_the_last(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(A)
    looks: list[str] = []

    def fail(text: str) -> Source:
        looks.append(text)
        raise KeyError("odd")

    discovery = Discovery((), file, file_seconds=0.005)
    with monkeypatch.context() as patch:
        patch.setattr(discovery_module, "parse", fail)
        file.write_text(B)
        discovery.start()
        wait_until(lambda: looks and caplog.messages)
        assert discovery.found == sources(A)
        file.write_text(C)
        wait_until(lambda: C in looks)
    file.write_text(f"{B}\n{C}")
    wait_until(lambda: discovery.found == sources(B, C))
    discovery.stop()
    assert set(caplog.messages) == {"kvcache: the sources could not be looked up: KeyError: 'odd'"}
    assert len(caplog.messages) <= 2  # Once for each content of the file.


def test_nothing_that_can_change_needs_no_thread() -> None:
    before = threading.active_count()
    Discovery(sources(A), None).start()
    assert threading.active_count() == before
