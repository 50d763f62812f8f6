"""The transfers of one direction that are ended by a key, and ends that come before their key.

An engine launches a copy and returns what it calls it; a thread that finds it done may be faster. Its end is remembered
for as long as a transfer may still get that key: one that began before the end came, and has none yet.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvcache_otel.record.complaints import Complaints
    from kvcache_otel.record.transfer import Transfer

LATER: Final = object()
"""In place of a key: `Transfers.keep` will say it, perhaps after another thread has said that the transfer ended."""


# Transfers that may have a key at once, for each that is looked after.
KEPT = 16


class _AsRead:
    """In place of events that were lent: what they told when they could be read."""

    __slots__ = ("_done", "_milliseconds")

    def __init__(self, before: Any, after: Any) -> None:
        self._done = after.query()
        self._milliseconds = before.elapsed_time(after) if self._done else None

    def query(self) -> bool:
        return self._done

    def elapsed_time(self, _: Any, /) -> Any:
        return self._milliseconds


class _Early:
    """An end that came before its key.

    Attributes:
        came: When, by `time.monotonic`.
        said: What was said of the end.
        brought: Whether the thread that brought it has let go of it.
    """

    __slots__ = ("brought", "came", "said")

    def __init__(self, said: dict[str, Any]) -> None:
        self.came = time.monotonic()
        self.said = said
        self.brought = False
        if said["at"] is None:
            said["at"] = self.came
        if said["lent"] and said["events"] is not None:
            read = _AsRead(*said["events"])
            said["events"] = read, read


class Keys:
    """Which transfer has which key. Without a lock: of what two threads want, one of them pops it.

    Attributes:
        forgotten: Transfers that found no room any more and have not ended: nobody knows their keys.
    """

    __slots__ = ("_complaints", "_deadline_s", "_early", "_end_forgotten", "_kept", "_launching", "_limit", "forgotten")

    def __init__(
        self, complaints: Complaints, deadline_s: float, limit: int, end_forgotten: Callable[[dict[str, Any]], None]
    ) -> None:
        """Args:
        complaints: Counts the ends that have no beginning.
        deadline_s: After how many seconds a transfer is not expected to get a key any more.
        limit: How many ends are remembered, and how many transfers wait for their key; `KEPT` times as many have one.
        end_forgotten: Called with what was said of the end of a transfer that is forgotten.
        """
        self._complaints, self._deadline_s, self._limit = complaints, deadline_s, limit
        self._end_forgotten = end_forgotten
        self.forgotten = 0
        self._kept: dict[Hashable, Transfer] = {}
        self._early: dict[Hashable, _Early] = {}
        # Those that will be kept, the oldest first; behind it also some that have been, or never will.
        self._launching: deque[Transfer] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._kept)

    def expect(self, transfer: Transfer) -> None:
        """Says that a transfer has begun which will get a key later."""
        transfer.expected = True
        self._forget_launched()
        self._launching.append(transfer)

    def keep(self, transfer: Transfer, key: Hashable) -> Transfer | None:
        """Gives a transfer its key, and ends it where its end has come already.

        Returns:
            Who had the key before.
        """
        kept = self._kept
        before = kept.pop(key, None)
        if before is None and len(kept) >= KEPT * self._limit:
            self._forget(_pop_oldest(kept))
        kept[key] = transfer
        if self._early:
            # Whoever takes the end out ends the transfer: this thread, or the one that brings it.
            if (early := self._early.pop(key, None)) is not None:
                if early.came < transfer.began:  # It was another's.
                    self._unbegun(early.said)
                else:
                    kept.pop(key, None)
                    transfer.end(**early.said)
            transfer.expected = False
            self.look_after()
        transfer.expected = False  # Only now: while it is expected, nobody gives its end up.
        return before

    def pop(self, key: Hashable) -> Transfer | None:
        """Takes out the transfer that has a key; None where there is none."""
        return self._kept.pop(key, None)

    def take_out(self, transfer: Transfer, key: Hashable | None) -> None:
        """Takes out a transfer that nobody ends, if it has got its key already."""
        with suppress(TypeError):  # It may be no key at all.
            if key is not None and self._kept.get(key) is transfer:
                self._kept.pop(key, None)

    def pop_any(self) -> Transfer | None:
        """Takes a transfer out, whatever its key; None where there is none left."""
        try:
            return self._kept.popitem()[1]
        except KeyError:
            return None

    def end_early(self, key: Hashable, said: dict[str, Any]) -> None:
        """Says that a transfer has ended which has no key yet, as far as one may still get this one.

        Args:
            key: The key.
            said: What `Transfer.end` will be called with.
        """
        self.look_after()
        if not self._launching or key in self._early:
            if (transfer := self._kept.pop(key, None)) is not None:  # Meanwhile it has it.
                transfer.end(**said)
            else:
                self._unbegun(said)
            return
        early = self._early[key] = _Early(said)
        transfer = self._kept.pop(key, None)
        if transfer is not None and self._early.pop(key, None) is not None:  # It got it before it could see this.
            transfer.end(**early.said)
        early.brought = True
        if len(self._early) > self._limit and (oldest := _pop_oldest(self._early)) is not None:
            self._unbegun(oldest.said)

    def look_after(self) -> None:
        """Counts the ends that no transfer is expected for any more; on any thread."""
        self._forget_launched(time.monotonic() - self._deadline_s)
        early_ends, launching = self._early, self._launching
        while early_ends:
            try:
                key, early = next(iter(early_ends.items()))
                if not early.brought or (launching and launching[0].began <= early.came):
                    return
            except (StopIteration, RuntimeError, IndexError):  # Another thread is at it.
                return
            if early_ends.pop(key, None) is not None:
                self._unbegun(early.said)

    def clear(self) -> None:
        """Forgets all of them."""
        self._kept.clear()
        self._early.clear()
        self._launching.clear()
        self.forgotten = 0

    def _forget_launched(self, since: float = 0.0) -> None:
        launching = self._launching
        while launching:
            try:
                oldest = launching[0]
                if oldest.expected and not oldest.ended and oldest.began >= since:
                    return
                launching.remove(oldest)  # Not what is oldest by now.
            except (IndexError, ValueError):  # Another thread has done it.
                continue

    def _forget(self, transfer: Transfer | None) -> None:
        if transfer is not None and not transfer.ended:
            transfer.ended = True  # Whoever has it must not end it too: it is ended by its key.
            self.forgotten += 1
            self._complaints.crowded_out(KEPT * self._limit)

    def _unbegun(self, said: dict[str, Any]) -> None:
        """Hears of an end whose transfer is not known: it is taken for that of one that was forgotten, if any was."""
        if self.forgotten > 0:
            self.forgotten -= 1
            self._end_forgotten(said)
        else:
            self._complaints.contradicted("ended that had not begun", Reason.MISSING_ROW)


def _pop_oldest(mapping: dict[Any, Any]) -> Any:
    """Takes the oldest out of a dict that other threads are at; None where there is none left."""
    while mapping:
        with suppress(StopIteration, RuntimeError):  # Another thread has changed it.
            if (oldest := mapping.pop(next(iter(mapping)), None)) is not None:
                return oldest
    return None
