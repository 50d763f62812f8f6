"""Reads the payloads of KV events: from bytes to a `Batch`, whichever of the known forms they are in.

A payload is read in one go where everything in it is as expected. Where something is not, it is taken apart, and an
event that cannot be read loses only itself. Token ids are skipped in either case.

A block is known by an int. An int on the wire stands for itself: a publisher writes its hashes signed (SGLang) or
unsigned (vLLM), never both, so a negative one and the unsigned one of the same bits are two blocks. Bytes become an int
that is equal to no int of 64 bits and to no bytes of another length; it takes a fifth less memory than they do.
"""

from __future__ import annotations

import secrets
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import UNSET, DecodeError, Raw, Struct, ValidationError
from msgspec.msgpack import Decoder

from kvcache_otel.events import forms
from kvcache_otel.semconv import Engine, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

    Stored = forms.StoredMap[int] | forms.StoredArray[int]
    Removed = forms.RemovedMap[int] | forms.RemovedArray[int]
    Cleared = forms.ClearedMap | forms.ClearedArray
    Event = Stored | Removed | Cleared | forms.Other

LARGEST: Final = 16 * 2**20
"""Bytes of a payload, at the most: three million tokens in one step of an engine. What is made of them takes nine times
that at the worst."""

MOST_EVENTS: Final = 2**17
"""Events of a batch that is taken apart, at the most."""

MOST_FAILURES: Final = 1000
"""Events of a batch that cannot be read before the rest of it is given up too, and counted as such."""


class WireError(ValueError):
    """A payload of which nothing can be read.

    Attributes:
        reason: Why, in the words of ``kvcache.event.decode.failures``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Batch(Struct):
    """What one payload says.

    Attributes:
        timestamp: When it was published, as the publisher's clock has it; None where it does not say.
        rank: The data-parallel rank; None where it does not say.
        events: In their order. Each has a `kind`, one of `EventType`, its `block_hashes`, and its `medium` as written.
        failures: Events that could not be read, by reason.
        engine: The engine whose name for the rank it uses; None where that tells nothing.
    """

    timestamp: float | None
    rank: int | None
    events: Sequence[Event]
    failures: dict[str, int]
    engine: str | None = None


class _Form(NamedTuple):
    decode: Any
    ints: bool
    maps: bool


def _forms(envelope: Any) -> tuple[_Form, ...]:
    """Returns what reads a batch in one go, for one envelope and each form of events and hashes."""
    return tuple(
        _Form(Decoder(envelope[_events(array, hashes)]).decode, hashes is int, not array)
        for hashes in (int, forms.LongBytes)
        for array in (False, True)
    )


def _events(array: bool, hashes: Any) -> Any:
    if array:
        return forms.StoredArray[hashes] | forms.RemovedArray[hashes] | forms.ClearedArray
    return forms.StoredMap[hashes] | forms.RemovedMap[hashes] | forms.ClearedMap


_IN_ARRAYS, _IN_MAPS = _forms(forms.ArrayEnvelope), _forms(forms.MapEnvelope)

_ARRAY_ENVELOPE, _MAP_ENVELOPE = Decoder(forms.LooseArrayEnvelope), Decoder(forms.LooseMapEnvelope)
_ARRAY_EVENT, _MAP_EVENT = (Decoder[Any](_events(array, int | forms.Bytes)) for array in (True, False))
_LOOSE_ARRAY_EVENT, _LOOSE_MAP_EVENT = Decoder(forms.LooseArrayEvent), Decoder(forms.LooseMapEvent)
_PARTS = Decoder(list[Raw])
_ANYTHING = Decoder(Raw)
_HASHES = Decoder[Any](list[int | forms.Bytes])
_NAME = Decoder(str)
_MAYBE_NAME = Decoder[Any](str | None)
_TIMESTAMP = Decoder[Any](float | None)
_RANK = Decoder[Any](forms.Rank | None)

_BYTES = 1 << 66
"""Added to the 64 bits that bytes are kept as, so that no int of an engine's is equal.

They are Python's own hash of them, with a key of this process: whoever could choose bytes that end up in one place of a
dict would stop the loop with a megabyte of them. Of 20 million, two are taken for one block once in 100,000 times.
"""

_HIGHEST_GROUP = 0x7F
_GROUPED = 1 << 80
"""Added to an int of 64 bits and its group, so that no other such int is equal. Takes no more memory than it alone."""

_MASKS: Final = tuple(secrets.randbits(63) for _ in range(_HIGHEST_GROUP + 1))
"""What the blocks of each group are mixed with: nobody can choose ints of many that end up in one place of a dict.

Of one group there are a dozen at the most: so many ints of 64 bits have one hash.
"""

_NO_FAILURES: Final[dict[str, int]] = {}


class PayloadDecoder:
    """Reads the payloads of one source, and tries first what was right the last time."""

    __slots__ = ("_in_arrays", "_in_maps")

    def __init__(self) -> None:
        self._in_arrays = list(_IN_ARRAYS)
        self._in_maps = list(_IN_MAPS)

    def decode(self, payload: Buffer) -> Batch:
        """Reads one payload.

        Raises:
            WireError: Where nothing can be read. Nothing else is raised, whatever the payload is.
        """
        try:
            return self._decode(payload)
        except WireError:
            raise
        except RecursionError:
            raise WireError(Reason.OTHER, "nested too deeply") from None
        except ValidationError as error:
            raise WireError(Reason.BATCH_SHAPE, str(error)) from None
        except DecodeError as error:
            raise WireError(Reason.MSGPACK, str(error)) from None
        except Exception as error:  # No bytes, or no memory.
            raise WireError(Reason.OTHER, f"{type(error).__name__}: {error}") from None

    def _decode(self, payload: Buffer) -> Batch:
        view = memoryview(payload)
        if view.nbytes > LARGEST:
            raise WireError(Reason.OTHER, f"a payload of {view.nbytes} bytes")
        if not view.nbytes:
            raise WireError(Reason.MSGPACK, "an empty payload")
        head = view.cast("B")[0]
        if forms.is_array(head):
            return self._in_array(payload)
        if forms.is_map(head):
            return self._in_map(payload)
        _ANYTHING.decode(payload)
        raise WireError(Reason.BATCH_SHAPE, "a batch that is neither an array nor a map")

    def _in_array(self, payload: Buffer) -> Batch:
        envelope: forms.ArrayEnvelope[Event] | None = _whole(payload, self._in_arrays)
        if envelope is not None:
            return Batch(_finite(envelope.ts), envelope.rank, envelope.events, _NO_FAILURES)
        parts = _ARRAY_ENVELOPE.decode(payload)
        rank = None if parts.rank is forms.ABSENT else _RANK.decode(parts.rank)
        return _taken_apart(parts.ts, parts.events, rank, None)

    def _in_map(self, payload: Buffer) -> Batch:
        envelope: forms.MapEnvelope[Event] | None = _whole(payload, self._in_maps)
        if envelope is not None:
            ranks = envelope.data_parallel_rank, envelope.attn_dp_rank, envelope.dp_rank
            named = [None if rank is UNSET else rank for rank in ranks]
            engine = _namer(ranks[0] is not UNSET, ranks[1] is not UNSET)
            return Batch(_finite(envelope.ts), _first(named), envelope.events, _NO_FAILURES, engine)
        parts = _MAP_ENVELOPE.decode(payload)
        raw = parts.data_parallel_rank, parts.attn_dp_rank, parts.dp_rank
        named = [None if rank is forms.ABSENT else _RANK.decode(rank) for rank in raw]
        engine = _namer(raw[0] is not forms.ABSENT, raw[1] is not forms.ABSENT)
        return _taken_apart(parts.ts, parts.events, _first(named), engine)


def _whole(payload: Buffer, known: list[_Form]) -> Any:
    """Returns the batch where one form fits all of it, or None."""
    apart = _BYTES
    for place, form in enumerate(known):
        try:
            envelope = form.decode(payload)
        except DecodeError:
            continue
        if place:
            known.insert(0, known.pop(place))
        if not form.ints:
            for event in envelope.events:
                if event.block_hashes:
                    event.block_hashes = [apart + hash(block) for block in event.block_hashes]
        if form.maps:
            for event in envelope.events:
                if event.group_idx is not forms.ABSENT:
                    _regroup(event)
        return envelope
    return None


def _taken_apart(ts: Raw, events: Raw, rank: int | None, engine: str | None) -> Batch:
    head = memoryview(events)[:5]
    if not forms.is_array(head[0]):
        raise WireError(Reason.BATCH_SHAPE, "events that are no array")
    if _length(head) > MOST_EVENTS:
        raise WireError(Reason.BATCH_SHAPE, f"{_length(head)} events in one batch")
    failures: dict[str, int] = {}
    read: list[Event] = []
    parts = _PARTS.decode(events)
    for place, part in enumerate(parts):
        event = _event(part)
        if not isinstance(event, str):
            read.append(event)
            continue
        failures[event] = failures.get(event, 0) + 1
        if place - len(read) >= MOST_FAILURES:  # Whoever sends this sends nothing else.
            failures[event] += len(parts) - place - 1
            break
    try:
        timestamp = _finite(_TIMESTAMP.decode(ts))
    except DecodeError:
        timestamp = None
    return Batch(timestamp, rank, read, failures, engine)


def _event(part: Raw) -> Event | str:
    """Returns one event, or why it cannot be read."""
    head = memoryview(part)[0]
    array = forms.is_array(head)
    if not array and not forms.is_map(head):
        return Reason.EVENT_SHAPE
    try:
        event = (_ARRAY_EVENT if array else _MAP_EVENT).decode(part)
    except DecodeError:
        return _unexpected(part, array)
    if event.block_hashes:
        event.block_hashes = [_identity(block) for block in event.block_hashes]
    if not array and event.group_idx is not forms.ABSENT:
        _regroup(event)
    return event


def _regroup(event: forms.StoredMap[int] | forms.RemovedMap[int]) -> None:
    """Tells a block of a group of layers from that of another group under the same hash; those of group 0 stay."""
    group = memoryview(event.group_idx)[0]
    if 0 < group <= _HIGHEST_GROUP:  # Nil and what is no small number are group 0, like everything that names none.
        mask = _MASKS[group]
        event.block_hashes = [_GROUPED + ((block ^ mask) << 8 | group) for block in event.block_hashes]


def _unexpected(part: Raw, array: bool) -> forms.Other | str:
    try:
        loose = _LOOSE_ARRAY_EVENT.decode(part) if array else _LOOSE_MAP_EVENT.decode(part)
        tag = _NAME.decode(loose.type)
        if tag not in (forms.STORED, forms.REMOVED, forms.CLEARED):
            return forms.Other(None if loose.medium is forms.ABSENT else _MAYBE_NAME.decode(loose.medium))
    except DecodeError:
        return Reason.EVENT_SHAPE
    if loose.block_hashes is forms.ABSENT or not forms.is_array(memoryview(loose.block_hashes)[0]):
        return Reason.EVENT_SHAPE
    if _length(memoryview(loose.block_hashes)[:5]) > forms.MOST_HASHES:
        return Reason.BLOCK_HASH
    return Reason.EVENT_SHAPE if _are_hashes(loose.block_hashes) else Reason.BLOCK_HASH


def _are_hashes(hashes: Raw) -> bool:
    try:
        _HASHES.decode(hashes)
    except DecodeError:
        return False
    return True


def _identity(block: int | bytes) -> int:
    return block if isinstance(block, int) else _BYTES + hash(block)


def _namer(data_parallel: bool, attention: bool) -> str | None:
    if data_parallel == attention:
        return None
    return Engine.VLLM if data_parallel else Engine.SGLANG


def _first(ranks: Iterable[int | None]) -> int | None:
    return next((rank for rank in ranks if rank is not None), None)


def _finite(timestamp: float | None) -> float | None:
    return timestamp if timestamp is not None and isfinite(timestamp) else None


def _length(head: memoryview) -> int:
    """Returns how many elements an array has, by its first bytes."""
    if head[0] == 0xDC:
        return int.from_bytes(head[1:3])
    return int.from_bytes(head[1:5]) if head[0] == 0xDD else head[0] & 0x0F


decode: Final = PayloadDecoder().decode
"""Reads one payload of any source; see `PayloadDecoder.decode`."""
