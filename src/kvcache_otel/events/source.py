"""Sources: where KV events come from, as an operator writes it.

``[name=]tcp://host:port[?engine=auto|vllm|sglang&replay=tcp://host:port&topic=TOPIC&block_size=TOKENS&clears=all|device]``
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from kvcache_otel.events.owner import LARGEST_BLOCK
from kvcache_otel.events.worker import AUTO
from kvcache_otel.record.labels import LONGEST, printable
from kvcache_otel.semconv import Engine

ENGINES = (AUTO, Engine.VLLM, Engine.SGLANG)

ALL, DEVICE = "all", "device"
"""What "all blocks cleared" may clear."""

MANY = "dns+tcp"
"""The scheme of a name that resolves to many publishers, each of which is a worker of its own."""

_SCHEMES = ("tcp", "ipc", MANY)
_OPTIONS = ("engine", "replay", "topic", "block_size", "clears")
_LONGEST_REASON = 512


class SourceError(ValueError):
    """A source that cannot be read; its words name the source and what is wrong with it."""


class Source(NamedTuple):
    """One publisher, or the many that a name resolves to.

    Attributes:
        name: What rows call it.
        endpoint: Where it publishes: ``tcp://host:port``, ``ipc://path``, or ``dns+tcp://host:port`` for many. Where
            the host is ``*``, publishers connect to us.
        engine: What its events mean, one of `ENGINES`.
        replay: Where it sends again what was missed; empty where it does not.
        topic: What the topics begin with that are wanted; empty for all.
        block_size: Tokens in a block of the device tier; None where that is to be learned.
        clears: What "all blocks cleared" clears, `ALL` tiers or that of the `DEVICE`; empty for what its engine means.
    """

    name: str
    endpoint: str
    engine: str = AUTO
    replay: str = ""
    topic: str = ""
    block_size: int | None = None
    clears: str = ""

    @property
    def connection(self) -> tuple[str, str, str, str]:
        """What a connection to it is made of; the rest says what its events mean."""
        return self.name, self.endpoint, self.replay, self.topic

    @property
    def clears_device_only(self) -> bool | None:
        """Whether "all blocks cleared" means the device's alone; None for what its engine means."""
        return self.clears == DEVICE if self.clears else None

    @property
    def is_many(self) -> bool:
        """Whether its host is a name that is to be resolved to many."""
        return self.endpoint.startswith(f"{MANY}://")

    @property
    def binds(self) -> bool:
        """Whether its publishers connect to us, and not we to it."""
        return self.endpoint.startswith("tcp://*:")

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of its endpoint, which is a TCP one."""
        return _address(self.endpoint)

    def at(self, host: str) -> Source:
        """Returns the one publisher at an address that its name resolves to."""
        ours, port = self.address
        host = f"[{host}]" if ":" in host else host
        replay = self.replay
        if replay.startswith("tcp://"):
            there, its_port = _address(replay)
            replay = f"tcp://{host if there == ours else there}:{its_port}"
        return self._replace(name=f"{self.name}/{host}:{port}", endpoint=f"tcp://{host}:{port}", replay=replay)


def parse(text: str) -> Source:
    """Reads one source.

    Args:
        text: As an operator writes it.

    Raises:
        SourceError: It cannot be read.
    """
    text = text.strip()
    if not text.isprintable():
        raise _wrong(text, "there is something in it that cannot be printed, or is not UTF-8")
    head, found, rest = text.partition("://")
    name, _, scheme = head.rpartition("=")
    if not found or scheme not in _SCHEMES:
        raise _wrong(text, f"it must be [name=]tcp://host:port, and may begin with {', '.join(_SCHEMES)} alone")
    if len(name) > LONGEST:
        raise _wrong(text, f"its name is longer than {LONGEST} characters")
    where, _, query = rest.partition("?")
    options = _options(text, query)
    endpoint = f"{scheme}://{where}"
    if scheme == "ipc":
        if not where:
            raise _wrong(text, "ipc:// needs a path")
    else:
        endpoint = _checked(text, endpoint, scheme)
    engine = options.get("engine", AUTO)
    if engine not in ENGINES:
        raise _wrong(text, f"engine={printable(engine)!r} is none of {', '.join(ENGINES)}")
    clears = options.get("clears")
    if clears not in (None, ALL, DEVICE):
        raise _wrong(text, f"clears={printable(clears)!r} is neither {ALL} nor {DEVICE}")
    source = Source(
        name=name or endpoint,
        endpoint=endpoint,
        engine=engine,
        topic=options.get("topic", ""),
        block_size=_block_size(text, options.get("block_size")),
        clears=clears or "",
    )
    return source._replace(replay=_replay(text, source, options.get("replay", "")))


def _options(text: str, query: str) -> dict[str, str]:
    query = query.replace("+", "%2B")  # It is one, and not a blank, as it would be in a form.
    try:
        pairs = (
            parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=16, errors="strict")
            if query
            else []
        )
    except UnicodeDecodeError as error:
        raise _wrong(text, f"?{printable(query)} is not UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise _wrong(text, f"?{printable(query)} cannot be read ({error})") from None
    options = dict(pairs)
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise _wrong(text, f"there is no option {printable(unknown[0])!r}, but {', '.join(_OPTIONS)}")
    if len(options) < len(pairs):
        raise _wrong(text, "an option is given twice")
    return options


def _checked(text: str, endpoint: str, scheme: str) -> str:
    """Returns an endpoint as ZeroMQ wants it; raises where it has no host, no port or something else."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _wrong(text, f"{printable(endpoint)} is no endpoint ({error})") from None
    shown = f"[{host}]" if ":" in (host or "") else host
    alone = parts.netloc.rpartition(":")[0].lower() == str(shown).lower()  # Nothing is written around it.
    if not host or not alone or port is None or port == 0 or parts.path or parts.fragment:
        raise _wrong(text, f"{printable(endpoint)} is not {scheme}://host:port")
    if not host.isascii() or not host.isprintable() or " " in host:
        raise _wrong(text, f"{printable(endpoint)} has no host that can be looked up")
    if host in ("0.0.0.0", "::"):
        host = "*"
    if host == "*" and scheme == MANY:
        raise _wrong(text, f"{MANY}:// needs a name that can be looked up")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _replay(text: str, source: Source, given: str) -> str:
    if not given:
        return ""
    if source.binds:
        raise _wrong(text, "there is no replay from publishers that connect to us")
    if given.startswith("ipc://"):
        if given == "ipc://":
            raise _wrong(text, "replay=ipc:// needs a path")
        return given
    if given.isascii() and given.isdecimal() and source.endpoint.startswith(("tcp://", f"{MANY}://")):
        given = f"tcp://{source.address[0]}:{given}"
    if not given.startswith("tcp://"):
        raise _wrong(text, f"replay={printable(given)!r} is neither tcp://host:port nor a port")
    replay = _checked(text, given, "tcp")
    if replay.startswith("tcp://*:"):
        raise _wrong(text, f"replay={printable(given)!r} is no address to connect to")
    return replay


def _block_size(text: str, given: str | None) -> int | None:
    if given is None:
        return None
    size = int(given) if given.isascii() and given.isdecimal() and len(given) < 11 else 0
    if not 0 < size <= LARGEST_BLOCK:
        raise _wrong(text, f"block_size={printable(given)!r} is no number of tokens")
    return size


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    return host, int(port)


def _wrong(text: str, why: str) -> SourceError:
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in why[:_LONGEST_REASON])
    return SourceError(f"source {printable(text)!r}: {line}")
