"""Sources as operators write them: every form, every mistake and its one line."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache_otel.events.source import Source, SourceError, parse
from kvcache_otel.record.labels import LONGEST

TCP = "tcp://host:5557"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (TCP, Source(TCP, TCP)),
        (f"  {TCP}\n", Source(TCP, TCP)),
        (f"pod-0={TCP}", Source("pod-0", TCP)),
        (f"a=b={TCP}", Source("a=b", TCP)),
        (f"={TCP}", Source(TCP, TCP)),
        (f"数 0={TCP}", Source("数 0", TCP)),
        ("tcp://Host.Example:1", Source("tcp://host.example:1", "tcp://host.example:1")),
        ("tcp://127.0.0.1:65535", Source("tcp://127.0.0.1:65535", "tcp://127.0.0.1:65535")),
        ("x=tcp://[::1]:5557", Source("x", "tcp://[::1]:5557")),
        ("x=tcp://[fe80::1%eth0]:5557", Source("x", "tcp://[fe80::1%eth0]:5557")),
        ("x=tcp://*:5557", Source("x", "tcp://*:5557")),
        ("x=tcp://0.0.0.0:5557", Source("x", "tcp://*:5557")),
        ("x=tcp://[::]:5557", Source("x", "tcp://*:5557")),
        ("x=dns+tcp://pods.svc:5557", Source("x", "dns+tcp://pods.svc:5557")),
        ("x=ipc:///run/kv.sock", Source("x", "ipc:///run/kv.sock")),
        (f"{TCP}?", Source(TCP, TCP)),
        (f"{TCP}?engine=vllm", Source(TCP, TCP, engine="vllm")),
        (f"{TCP}?engine=sglang", Source(TCP, TCP, engine="sglang")),
        (f"{TCP}?engine=auto", Source(TCP, TCP)),
        (f"{TCP}?topic=kv@pod@model", Source(TCP, TCP, topic="kv@pod@model")),
        (f"{TCP}?topic=a%20b%26c", Source(TCP, TCP, topic="a b&c")),
        (f"{TCP}?topic=", Source(TCP, TCP)),
        (f"{TCP}?block_size=16", Source(TCP, TCP, block_size=16)),
        (f"{TCP}?replay=5558", Source(TCP, TCP, replay="tcp://host:5558")),
        (f"{TCP}?replay=tcp://other:5558", Source(TCP, TCP, replay="tcp://other:5558")),
        (f"{TCP}?replay=tcp://[::1]:5558", Source(TCP, TCP, replay="tcp://[::1]:5558")),
        (f"{TCP}?replay=ipc:///r", Source(TCP, TCP, replay="ipc:///r")),
        (f"{TCP}?replay=", Source(TCP, TCP)),
        ("x=tcp://[::1]:5557?replay=5558", Source("x", "tcp://[::1]:5557", replay="tcp://[::1]:5558")),
        ("x=dns+tcp://n:7?replay=8", Source("x", "dns+tcp://n:7", replay="tcp://n:8")),
        ("x=ipc:///kv?replay=ipc:///r", Source("x", "ipc:///kv", replay="ipc:///r")),
        (
            f"w={TCP}?engine=vllm&replay=1&topic=t&block_size=32",
            Source("w", TCP, "vllm", "tcp://host:1", "t", 32),
        ),
    ],
)
def test_forms(text: str, source: Source) -> None:
    assert parse(text) == source


def test_what_a_source_is() -> None:
    assert parse("tcp://*:1").binds
    assert not parse(TCP).binds
    assert parse("dns+tcp://n:1").is_many
    assert not parse(TCP).is_many
    assert parse("tcp://[::1]:5").address == ("[::1]", 5)
    assert parse("dns+tcp://n:7").address == ("n", 7)


@pytest.mark.parametrize(
    ("text", "host", "source"),
    [
        ("x=dns+tcp://n:7", "10.0.0.1", Source("x/10.0.0.1:7", "tcp://10.0.0.1:7")),
        ("x=dns+tcp://n:7", "fd00::1", Source("x/[fd00::1]:7", "tcp://[fd00::1]:7")),
        ("x=dns+tcp://n:7?replay=8", "::1", Source("x/[::1]:7", "tcp://[::1]:7", replay="tcp://[::1]:8")),
        ("x=dns+tcp://n:7?replay=8", "1.1.1.1", Source("x/1.1.1.1:7", "tcp://1.1.1.1:7", replay="tcp://1.1.1.1:8")),
        (
            "x=dns+tcp://n:7?replay=tcp://fixed:8&engine=vllm&topic=t&block_size=4",
            "1.1.1.1",
            Source("x/1.1.1.1:7", "tcp://1.1.1.1:7", "vllm", "tcp://fixed:8", "t", 4),
        ),
    ],
)
def test_one_of_many(text: str, host: str, source: Source) -> None:
    one = parse(text).at(host)
    assert one == source
    assert not one.is_many


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it must be [name=]tcp://host:port, and may begin with tcp, ipc, dns+tcp alone"),
        ("host:5557", "it must be [name=]tcp://host:port"),
        ("http://host:5557", "it must be [name=]tcp://host:port"),
        ("TCP://host:5557", "it must be [name=]tcp://host:port"),
        ("a b tcp://host:5557", "it must be [name=]tcp://host:port"),
        ("tcp://", "tcp:// is not tcp://host:port"),
        ("tcp://host", "tcp://host is not tcp://host:port"),
        ("tcp://host:", "tcp://host: is not tcp://host:port"),
        ("tcp://:5557", "tcp://:5557 is not tcp://host:port"),
        ("tcp://host:0", "tcp://host:0 is not tcp://host:port"),
        ("tcp://host:65536", "tcp://host:65536 is no endpoint (Port out of range 0-65535)"),
        ("tcp://host:-1", "tcp://host:-1 is no endpoint"),
        ("tcp://host:x", "tcp://host:x is no endpoint"),
        ("tcp://host:*", "tcp://host:* is no endpoint"),
        ("tcp://host:5557/path", "is not tcp://host:port"),
        ("tcp://host:5557#x", "is not tcp://host:port"),
        ("tcp://me@host:5557", "is not tcp://host:port"),
        ("tcp://[::1:5557", "is no endpoint (Invalid IPv6 URL)"),
        ("tcp://[::1]x:5557", "is not tcp://host:port"),
        ("tcp://ho st:5557", "has no host that can be looked up"),
        ("tcp://höst:5557", "has no host that can be looked up"),
        ("ipc://", "ipc:// needs a path"),
        ("dns+tcp://*:5557", "dns+tcp:// needs a name that can be looked up"),
        ("dns+tcp://0.0.0.0:5557", "dns+tcp:// needs a name that can be looked up"),
        (f"{TCP}?engine=tensorrt", "engine='tensorrt' is none of auto, vllm, sglang"),
        (f"{TCP}?engine=", "engine='' is none of auto, vllm, sglang"),
        (f"{TCP}?block_size=0", "block_size='0' is no number of tokens"),
        (f"{TCP}?block_size=-1", "block_size='-1' is no number of tokens"),
        (f"{TCP}?block_size=x", "block_size='x' is no number of tokens"),
        (f"{TCP}?block_size=", "block_size='' is no number of tokens"),
        (f"{TCP}?block_size=2147483648", "is no number of tokens"),
        (f"{TCP}?block_size={'9' * 5000}", "is no number of tokens"),
        (f"{TCP}?block_size=²", "block_size='²' is no number of tokens"),
        (f"{TCP}?clears=", "clears='' is neither all nor device"),
        (f"{TCP}?clears=host", "clears='host' is neither all nor device"),
        (f"{TCP}?topic=%FF", "?topic=%FF is not UTF-8"),
        (f"{TCP}?colour=red", "there is no option 'colour', but engine, replay, topic, block_size"),
        (f"{TCP}?topic", "?topic cannot be read"),
        (f"{TCP}?topic=a&topic=b", "an option is given twice"),
        (f"{TCP}?{'&'.join('topic=a' for _ in range(40))}", "cannot be read"),
        (f"{TCP}?replay=x", "replay='x' is neither tcp://host:port nor a port"),
        (f"{TCP}?replay=²", "replay='²' is neither tcp://host:port nor a port"),
        (f"{TCP}?replay=99999", "tcp://host:99999 is no endpoint"),
        (f"{TCP}?replay=tcp://host", "is not tcp://host:port"),
        (f"{TCP}?replay=tcp://*:5558", "replay='tcp://*:5558' is no address to connect to"),
        (f"{TCP}?replay=ipc://", "replay=ipc:// needs a path"),
        ("ipc:///kv?replay=5558", "replay='5558' is neither tcp://host:port nor a port"),
        ("tcp://*:1?replay=5558", "there is no replay from publishers that connect to us"),
        ("tcp://*:1?replay=ipc:///r", "there is no replay from publishers that connect to us"),
        ("tcp://*:1?replay=tcp://a:2", "there is no replay from publishers that connect to us"),
        (f"{'n' * (LONGEST + 1)}={TCP}", f"its name is longer than {LONGEST} characters"),
        (f"a\nb={TCP}", "there is something in it that cannot be printed"),
        ("ipc:///a\0b", "there is something in it that cannot be printed"),
        ("ipc:///\udcff", "there is something in it that cannot be printed, or is not UTF-8"),
        (f"{TCP}?topic=\udcff", "there is something in it that cannot be printed, or is not UTF-8"),
        (f"\x1b[31m={TCP}", "there is something in it that cannot be printed"),
    ],
)
def test_mistakes(text: str, why: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse(text)
    said = str(caught.value)
    assert why in said
    assert said.startswith(f"source {text.strip()[:LONGEST].encode('utf-8', 'replace').decode()!r}: ")
    assert said.isprintable()
    assert len(said) < 2000


ALPHABET = st.sampled_from(
    [*"=:/?&%@[]*.#;,+-\\ \t\n\0\x1b\x85\u2028\ud800²数", "0", "7", "f", "a", "::1", "%00", "%0a"]
)
PIECES = st.sampled_from(
    ["tcp://", "ipc://", "dns+tcp://", "host", "*", "[::1]", "0.0.0.0", ":5557", ":0", "?", "&", "name=", "engine="]
) | st.sampled_from(["vllm", "replay=", "5558", "topic=", "block_size=", "16"])
HOSTILE = st.lists(ALPHABET | PIECES | st.text(max_size=3), max_size=14).map("".join)


@settings(deadline=None)
@given(text=HOSTILE | st.text() | st.text(string.printable))
@example(text="tcp://a:1?" + "&" * 10_000)
@example(text="tcp://\uff0f:1")
@example(text="tcp://[1::%\x85]:5557")
def test_whatever_it_is_there_is_a_source_or_one_line(text: str) -> None:
    try:
        source = parse(text)
    except SourceError as error:
        said = str(error)
        assert said.startswith(("source '", 'source "'))
        assert said.isprintable()
        assert len(said) < 2000
        return
    assert source.endpoint.isprintable()
    assert source.name.isprintable()
    assert source.name
    source.topic.encode()
    source.replay.encode()
    if not source.endpoint.startswith("ipc://"):
        _, port = source.address
        assert 0 < port < 65536
        if not source.binds:
            assert parse(f"{source.name[:20]}={source.endpoint}").endpoint == source.endpoint
    if source.is_many:
        one = source.at("10.0.0.1")
        assert one.endpoint == f"tcp://10.0.0.1:{port}"


@pytest.mark.parametrize("written", ["a+b", "a%2Bb", "a%2bb"])
def test_a_plus_is_a_plus(written: str) -> None:
    assert parse(f"tcp://h:1?topic={written}&engine=vllm").topic == "a+b"
    assert parse("tcp://h:1?topic=a%20b").topic == "a b"
