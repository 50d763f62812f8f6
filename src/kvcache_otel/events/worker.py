"""A worker: one publisher of KV events, what it sends, and what that adds up to."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from kvcache_otel import semconv
from kvcache_otel.events.guess import EngineGuess
from kvcache_otel.events.owner import Owner
from kvcache_otel.events.wire import PayloadDecoder, WireError
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Engine, Reason, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Buffer

    from kvcache_otel.events.index import BlockIndex
    from kvcache_otel.events.room import Share
    from kvcache_otel.events.wire import Batch
    from kvcache_otel.record.probe import Labels

_logger = logging.getLogger(__name__)

AUTO = "auto"
"""An engine that is told by its events."""

OTHER = "_OTHER"
"""The worker of the rows in which owners are added up for which there is no room; their rank is `MORE`."""

MORE = -1
"""The rank of what is added up over ranks, and of what has no books."""

MOST_RANKS = 256
"""Ranks of one publisher that have books in any case. One that names more of them may be making them up: what has no
room for books is left out, see `Room.books`."""


class Worker:
    """One publisher: what it sends is decoded, counted and booked. It may have several sources, whose books are apart.

    Attributes:
        name: As it was given.
        label: What its rows call it; `OTHER` where there is no room for rows of its own.
    """

    __slots__ = (
        "_block_size",
        "_clears_device_only",
        "_decoder",
        "_engine",
        "_failures",
        "_guess",
        "_index",
        "_owners",
        "_reserved",
        "_resizes",
        "_said",
        "_share",
        "_taken",
        "label",
        "name",
    )

    def __init__(
        self,
        index: BlockIndex,
        name: str,
        label: str,
        share: Share,
        *,
        engine: str,
        block_size: int | None,
        clears_device_only: bool | None,
    ) -> None:
        """See `BlockIndex.add`, which makes them."""
        self.name = name
        self.label = label
        self._index: BlockIndex | None = index
        self._engine = None if engine == AUTO else engine
        self._guess = EngineGuess() if engine == AUTO else None
        self._block_size = block_size
        self._clears_device_only = clears_device_only
        self._share = share
        self._taken = [share] if label != OTHER else []  # Of which sources it has the room for its rows.
        self._reserved = label != OTHER  # The first rank has room, however many ranks others name.
        self._decoder = PayloadDecoder()
        self._owners: dict[Share, dict[int, Owner]] = {}
        self._said: set[str] = set()
        self._resizes: set[str] = set()
        self._failures = {
            reason: index.recorder.counter(
                semconv.EVENT_DECODE_FAILURES, {semconv.KVCACHE_WORKER: label, semconv.KVCACHE_REASON: reason}
            )
            for reason in sorted(semconv.EVENT_DECODE_FAILURES.values[semconv.KVCACHE_REASON])
        }

    @property
    def engine(self) -> str | None:
        """The engine, given or told by its events; None while it is not known."""
        return self._engine

    @property
    def ranks(self) -> tuple[int, ...]:
        """The data-parallel ranks that have been seen, `MORE` for all that have no books."""
        return tuple(dict.fromkeys(rank for owners in self._owners.values() for rank in owners))

    def receive(self, payload: Buffer, rank: int = 0, share: Share | None = None) -> Batch | None:
        """Decodes a payload, counts what cannot be read, and applies the rest; raises nothing, whatever it is.

        Args:
            payload: One batch, as it came.
            rank: The data-parallel rank, where the batch names none.
            share: The source's that it came from; None for the first source's.

        Returns:
            The batch, or None where nothing could be read.
        """
        try:
            batch = self._decoder.decode(payload)
        except WireError as error:
            self.failed(error.reason, detail=str(error))
            return None
        self.apply(batch, rank, share)
        return batch

    def restore(self, payload: Buffer, rank: int = 0, share: Share | None = None) -> None:
        """Books a payload again that was counted when it was received, after the books were emptied.

        Args:
            payload: As in `receive`.
            rank: As in `receive`.
            share: As in `receive`.
        """
        try:
            batch = self._decoder.decode(payload)
        except WireError:
            return
        if self._index is not None:
            owner = self.owner(rank if batch.rank is None else batch.rank, share)
            if owner.booked:
                owner.restore(batch.events)

    def apply(self, batch: Batch, rank: int = 0, share: Share | None = None) -> None:
        """Books a batch, and counts those of its events that could not be read. Does nothing after the release.

        Args:
            batch: What was decoded.
            rank: The data-parallel rank, where the batch names none.
            share: As in `receive`.
        """
        index = self._index
        if index is None:
            return
        for reason, times in batch.failures.items():
            self.failed(reason, times, detail="an event")
        if self._guess is not None and self._guess.see(batch):
            self._settle(self._guess.engine, self._guess.why)
        owner = self.owner(rank if batch.rank is None else batch.rank, share)
        owner.heard = index.clock()
        if not owner.booked:
            index.recorder.dropped(Reason.LABEL_OVERFLOW).add(owner.count(batch.events))
            return
        index.changed.add(self)
        missing = owner.apply(batch.events)
        if missing and "missing" not in self._said:
            self._said.add("missing")
            _logger.warning(
                "kvcache: worker %r removes blocks that it has not stored: they were stored before we came, or their "
                "batches were lost; further ones are counted in kvcache.accounting.errors",
                printable(self.name),
            )

    def failed(self, reason: str, times: int = 1, *, detail: str = "") -> None:
        """Counts what could not be read, and says each reason once.

        Args:
            reason: Why, one of those of ``kvcache.event.decode.failures``.
            times: How often.
            detail: More about it, for the log.
        """
        self.count(reason, times)
        if self._index is not None and reason in self._failures and reason not in self._said:
            self._said.add(reason)
            _logger.warning(
                "kvcache: worker %r sends what cannot be read (%s): %r; "
                "further ones are counted in kvcache.event.decode.failures",
                printable(self.name),
                reason,
                printable(detail),
            )

    def count(self, reason: str, times: int = 1) -> None:
        """Counts what could not be read or was not taken, where somebody else says so."""
        self._failures.get(reason, self._failures[Reason.OTHER]).add(times)

    def owner(self, rank: int, share: Share | None = None) -> Owner:
        """Returns the owner of one rank of one source, whose rows exist from now on.

        Args:
            rank: The rank.
            share: As in `receive`.
        """
        share = share or self._share
        owners = self._owners.get(share)
        if owners is None:
            owners = self._owners[share] = {}
        owner = owners.get(rank)
        if owner is None:
            if len(owners) >= MOST_RANKS and not share.take_book():
                rank = MORE
                self._say_left_out(share)
            owner = owners.get(rank)
            if owner is None:
                self._look_for_another(rank, share)
                owner = owners[rank] = self._new(rank, share)
        return owner

    def labels(self, rank: int, share: Share | None = None) -> Labels:
        """Returns the labels for rows about one rank that are not the index's, such as those about its batches."""
        return dict(self.owner(rank, share).labels)

    def reset(self, rank: int | None = None, share: Share | None = None) -> None:
        """Empties the books of one rank, or of all, since the publisher has started again. The rows stay.

        Args:
            rank: The rank; None for all.
            share: The source whose books are meant; None for those of all.
        """
        for source, owners in self._owners.items():
            if share in (None, source):
                for known, owner in owners.items():
                    if rank in (None, known):
                        owner.empty()

    def leave(self, share: Share) -> None:
        """Ends the books of a source that is gone, while others stay, and the rows of ranks that it alone has told."""
        index, left = self._index, self._owners.pop(share, {})
        told = [owner.labels for owners in self._owners.values() for owner in owners.values()]
        ranks = {labels[semconv.KVCACHE_RANK_DP] for labels in told if labels[semconv.KVCACHE_WORKER] != OTHER}
        for rank, owner in left.items():
            owner.close()
            if index is not None and rank not in ranks and owner.labels[semconv.KVCACHE_WORKER] != OTHER:
                index.recorder.end(semconv.KVCACHE_WORKER, self.label, {semconv.KVCACHE_RANK_DP: rank})
        self._reserved = self._reserved and share is not self._share
        share.give_books_back(_further(left))
        for _ in range(self._taken.count(share)):
            self._taken.remove(share)
            share.give_back()

    def change(self, engine: str, block_size: int | None, clears_device_only: bool | None) -> bool:
        """Takes over what is said of it now, where its books can go on with that; returns whether they can.

        Args:
            engine: As in `BlockIndex.add`; ``auto`` leaves it as it is.
            block_size: The same; None leaves it as it is.
            clears_device_only: The same.
        """
        if self._engine is not None and engine not in (AUTO, self._engine):
            return False  # Copies have counted that should not have, or have not.
        settled = self._engine is None and engine != AUTO
        before = self._clears_only_the_device
        after = clears_device_only
        if after is None:
            after = (engine if settled else self._engine) == Engine.VLLM
        if after != before and not (settled and after):
            return False  # What was cleared should not have been, or the other way round.
        self._clears_device_only = clears_device_only
        if settled:
            self._settle(engine, "what its source says")
        if block_size is not None:
            self._block_size = block_size
            for owner in self._every():
                if owner.heard is None:  # What its events have said holds.
                    owner.resize(Tier.DEVICE, block_size)
        return True

    def blocks(self) -> Counter[str]:
        """Returns how many blocks there are, by medium, in the books of all ranks."""
        blocks = Counter[str]()
        for owner in self._every():
            blocks.update(owner.blocks())
        return blocks

    def fit(self) -> None:
        """Gives memory back that the books do not need; see `Book.fit`."""
        for owner in self._every():
            owner.fit()

    def forget(self, medium: str) -> None:
        """Empties the books of one medium, since there is no room for them."""
        for owner in self._every():
            owner.forget(medium)

    def release(self) -> None:
        """Ends all that there is of this worker; see `BlockIndex.release`."""
        if self._index is not None:
            self._index.release(self.name)

    def close(self) -> tuple[int, bool]:
        """Ends the books and their rows; returns how many blocks there were, and whether the rows had said so."""
        self._index = None
        blocks, agreed = 0, True
        for owner in self._every():
            held, right = owner.close()
            blocks, agreed = blocks + held, agreed and right
        for share, owners in self._owners.items():
            share.give_books_back(_further(owners))
        self._owners.clear()
        for share in self._taken:
            share.give_back()
        self._taken.clear()
        return blocks, agreed

    def _settle(self, engine: str | None, why: str) -> None:
        self._guess, self._engine = None, engine
        _logger.info("kvcache: worker %r is %s, by %s", printable(self.name), engine, why)
        for owner in self._every():
            owner.count_copies(self._copies)
            if self._clears_only_the_device:
                owner.clear_device_only()

    @property
    def _copies(self) -> bool:
        # As long as the engine is not known, copies are counted: they can be forgotten later, and not be made up.
        return self._engine in (None, Engine.VLLM)

    @property
    def _clears_only_the_device(self) -> bool:
        # vLLM's event is about its block pool alone; of the tiers below it announces no reset.
        return self._engine == Engine.VLLM if self._clears_device_only is None else self._clears_device_only

    def _every(self) -> Iterator[Owner]:
        for owners in self._owners.values():
            yield from owners.values()

    def _new(self, rank: int, share: Share) -> Owner:
        index = self._index
        if index is None:
            raise RuntimeError(f"worker {printable(self.name)!r} has been released")
        if self._reserved and share is self._share:
            own, self._reserved = True, False
        elif own := self.label != OTHER and share.take():
            self._taken.append(share)
        owner = Owner(
            index.recorder,
            {
                semconv.KVCACHE_WORKER: self.label if own else OTHER,
                semconv.KVCACHE_RANK_DP: rank if own else MORE,
            },
            index.clock,
            self._resized,
            copies=self._copies,
            clears_device_only=self._clears_only_the_device,
            booked=rank != MORE,
            tally=index.resident,
        )
        if self._block_size is not None:
            owner.resize(Tier.DEVICE, self._block_size)
        return owner

    def _say_left_out(self, share: Share) -> None:
        if "left out" not in self._said:
            self._said.add("left out")
            _logger.warning(
                "kvcache: source %s names more than %d ranks, and there is no room for more: the blocks of the others "
                "are in no book, and those that are stored are counted in kvcache.telemetry.dropped; their events are "
                "those of rank %d",
                share.source,
                MOST_RANKS,
                MORE,
            )

    def _look_for_another(self, rank: int, share: Share) -> None:
        """Counts two sources, or topics of one, that are one worker and say that they are one rank; says it once."""
        other = next((other for other, owners in self._owners.items() if other is not share and rank in owners), None)
        if other is None or self._index is None or rank == MORE:
            return
        self._index.wrong_source()
        if "another" not in self._said:
            self._said.add("another")
            text = (
                "kvcache: sources %s and %s are both worker %r, rank %d, which is what a batch without a rank means: "
                "their rows are added up; a name for each keeps them apart"
            )
            if share.is_beside(other):
                text = (
                    "kvcache: topics of one source, %s and %s, are both worker %r, rank %d, which is what a batch "
                    "without a rank means: their rows are added up; a source for each topic, with a name of its own, "
                    "keeps them apart"
                )
            _logger.warning(text, other.source, share.source, printable(self.name), rank)

    def _resized(self, where: str, old: int, new: int) -> None:
        if where not in self._resizes:
            self._resizes.add(where)
            _logger.warning(
                "kvcache: worker %r has changed its block size in the %s tier, from %d to %d tokens; "
                "further changes are in kvcache.block.size alone",
                printable(self.name),
                where,
                old,
                new,
            )


def _further(owners: Mapping[int, Owner]) -> int:
    """Returns how many of the ranks of one publisher have taken room for their books."""
    return max(0, sum(owner.booked for owner in owners.values()) - MOST_RANKS)
