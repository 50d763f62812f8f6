"""Facts about copies between tiers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.generic.facts import Fact, caught, optional
from kvcache_otel.record.keys import LATER
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Tier, TimingSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.engines.generic.call import Call, Given, Read
    from kvcache_otel.engines.generic.facts import Begin, Tell
    from kvcache_otel.engines.generic.rows import Rows
    from kvcache_otel.engines.hooks import Finish


@dataclass(frozen=True, kw_only=True)
class Copy(Fact):
    """A copy between two tiers, from the call to its return, or until a `CopiesDone` says that it has ended.

    Attributes:
        source: The tier that is read.
        destination: The tier that is written.
        tokens: Tokens copied: by pool, or a number of the source tier's first pool.
        bytes: Bytes copied.
        seconds: How long the copy took, as whoever made it says.
        events: Two events around it on its stream, that tell the time between them.
        lent: Whether these may be recorded again as soon as the method has returned.
        stream: The stream of a device that the method puts the copy on: events of ours are recorded there before and
            after the call. A value, or a callable of the `Call` alone.
        make_event: Makes such events, for a device that torch does not know by name.
        requested: Since when it was wanted, by `time.monotonic`: a callable of the `Call` alone.
        error: What went wrong, in a short word or as an exception; None, or anything that is false, where nothing did.
            What the method raises is seen without it.
        key: What `CopiesDone` will call it, where the method returns before the copy has ended.
    """

    REQUIRED = ("tokens", "bytes")
    WHAT = "copies from {source} to {destination}"

    source: str
    destination: str
    tokens: Given = None
    bytes: Given = None
    seconds: Read | None = None
    events: Read | None = None
    lent: bool = False
    stream: Any = None
    make_event: Callable[[], Any] | None = None
    requested: Callable[[Call], float] | None = None
    error: Read | None = None
    key: Read | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        clocks = [name for name in ("seconds", "events", "stream") if getattr(self, name) is not None]
        if len(clocks) > 1:
            raise TypeError(f"one of {'=, '.join(clocks)}= tells how long a copy took, not all of them")
        if self.key is not None and clocks:
            raise TypeError(f"a copy with key= is timed by its CopiesDone, not by {clocks[0]}=")
        _check_events(self)
        if self.requested is not None and not callable(self.requested):
            raise TypeError("requested= must be a callable of the call")

    def lost(self, rows: Rows, *, aside: bool) -> None:
        if aside:  # Of one that was missed, the beginning was taken back.
            rows.transfers(self.source, self.destination).end_active()

    def begin(self, rows: Rows) -> Begin:
        by_device = self.events is not None or self.stream is not None
        timing = TimingSource.DEVICE_EVENT if by_device else TimingSource.WALL_CLOCK
        timing = TimingSource.ENGINE_REPORT if self.seconds is not None else timing
        transfers = rows.transfers(
            self.source,
            self.destination,
            timing=timing,
            queued=self.requested is not None,
            make_event=self.make_event,
        )
        rows.tiers.check_pools(self.source, f"{type(self).__name__}: tokens", self.tokens)
        happened, tokens, moved = self.happened(), self.reader("tokens"), self.reader("bytes")
        seconds, events, error, key = map(optional, (self.seconds, self.events, self.error, self.key))
        stream, requested, lent = self.stream, self.requested, self.lent
        on: Callable[[Call], Any] = stream if callable(stream) else lambda _: stream

        def begun(call: Call) -> Finish:
            since = None if requested is None else requested(call)
            transfer = transfers.begin(stream=on(call), key=None if key is None else LATER)

            def ended(result: Any, raised: BaseException | None) -> None:
                at = time.monotonic()  # First: readers may take their time.
                try:
                    if raised is None and happened is not None and not happened(result, call):
                        transfer.cancel()
                        return
                    if stream is not None and raised is None:
                        transfer.mark_end()
                    if since is not None:
                        transfers.waited(transfer.began - since)
                    if raised is not None:
                        transfer.end(error=raised)
                    elif error is not None and (failure := error(result, call)):
                        transfer.end(error=failure)
                    else:
                        transfer.bytes, transfer.tokens = moved(result, call), tokens(result, call)
                        if transfer.tokens is None:
                            raise TypeError("tokens= gave None")
                        if key is not None:
                            transfers.keep(transfer, key(result, call))
                        else:
                            transfer.end(
                                seconds=None if seconds is None else seconds(result, call),
                                events=None if events is None else events(result, call),
                                lent=lent,
                                at=at,
                            )
                except BaseException as wrong:
                    transfer.cancel()  # It is not known what it was; that something is wrong is counted by the hook.
                    raise caught(wrong) from None

            return ended

        return begun


@dataclass(frozen=True, kw_only=True)
class Backup(Copy):
    """A copy from device to host."""

    source: str = Tier.DEVICE
    destination: str = Tier.HOST


@dataclass(frozen=True, kw_only=True)
class LoadBack(Copy):
    """A copy from host to device."""

    source: str = Tier.HOST
    destination: str = Tier.DEVICE


@dataclass(frozen=True, kw_only=True)
class Retraction(Backup):
    """A copy of what a retracted request holds, from device to host."""

    WHAT = "copies of retracted requests from {source} to {destination}"


@dataclass(frozen=True, kw_only=True)
class Restoration(LoadBack):
    """A copy of what a retracted request held, back to the device."""

    WHAT = "copies of retracted requests from {source} to {destination}"


@dataclass(frozen=True, kw_only=True)
class CopiesDone(Fact):
    """The method that finds copies done which have a key.

    Attributes:
        source: The tier that was read.
        destination: The tier that was written.
        keys: The keys of those that have ended since it was called last; None reads the result itself as them.
        seconds: How long one took, as whoever made it says: a callable of its key and the `Call`.
        events: Two events around one: a callable of its key and the `Call`.
        lent: Whether these may be recorded again as soon as the method has returned.
        error: What went wrong with one, as in `Copy`: a callable of its key and the `Call`.
    """

    WHAT = "when copies from {source} to {destination} have ended"

    source: str
    destination: str
    keys: Read | None = None
    seconds: Callable[[Any, Call], float | None] | None = None
    events: Callable[[Any, Call], Any] | None = None
    lent: bool = False
    error: Callable[[Any, Call], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_events(self)

    def lost(self, rows: Rows, *, aside: bool) -> None:
        rows.transfers(self.source, self.destination).end_active()

    def tell(self, rows: Rows) -> Tell:
        by_device = self.events is not None
        timing = TimingSource.ENGINE_REPORT if self.seconds is not None else TimingSource.WALL_CLOCK
        transfers = rows.transfers(
            self.source, self.destination, timing=TimingSource.DEVICE_EVENT if by_device else timing
        )
        rows.found_done.add((self.source, self.destination))
        happened, keys = self.happened(), self.keys or _itself
        seconds, events, error, lent = self.seconds, self.events, self.error, self.lent

        def done(result: Any, call: Call) -> None:
            at = time.monotonic()  # First: readers may take their time.
            if happened is not None and not happened(result, call):
                return
            found: Any = keys(result, call)
            if found is None or (
                type(found) in (bool, int) and not found
            ):  # An array says nothing of whether it is empty.
                return
            for key in found:
                transfers.end(
                    key,
                    seconds=None if seconds is None else seconds(key, call),
                    events=None if events is None else events(key, call),
                    lent=lent,
                    at=at,
                    error=None if error is None else error(key, call) or None,
                )

        return done


def _check_events(fact: Copy | CopiesDone) -> None:
    """Raises TypeError where what is said of a copy's events is not what it should be."""
    kind = type(fact).__name__
    if fact.events is not None and not callable(fact.events):
        raise TypeError(f"{kind}: events= must be a callable of the call, and not {printable(fact.events)!r}")
    if not isinstance(fact.lent, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{kind}: lent= must be True or False, and not {printable(fact.lent)!r}")


def _itself(result: Any, _: Call) -> Any:
    return result
