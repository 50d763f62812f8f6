"""The index: which blocks a consumer of KV events believes to be where, booked when an event says so, never by walking.

Books are kept by owner, which is a worker and one of its data-parallel ranks, and by medium. One thread applies what
comes; readers of the rows read cells.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvcache_otel import semconv
from kvcache_otel.events.counts import CELLS
from kvcache_otel.events.ledger import Tally
from kvcache_otel.events.room import Room, Share
from kvcache_otel.events.worker import AUTO, OTHER, Worker
from kvcache_otel.record.labels import LONGEST, printable
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.record.probe import Labels
    from kvcache_otel.record.recorder import Recorder

_logger = logging.getLogger(__name__)


MOST_BLOCKS = 2**26
"""Blocks of all workers together, in seven gigabytes. There are publishers that never say that a block is gone."""


def series(owners: int) -> int:
    """Returns how many series of one metric a recorder must allow for so many owners to have rows of their own."""
    return (owners + 1) * CELLS  # One is for all the others.


class BlockIndex:
    """The blocks of all workers.

    Attributes:
        recorder: Where the rows are.
        clock: Tells the time, in seconds.
        workers: Those that were added and not released, by name.
        resident: The blocks of all of them together.
        changed: Those whose books something has come for since `fit`.
    """

    def __init__(
        self, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic, further: int | None = None
    ) -> None:
        """Args:
        recorder: Where the rows are. How many series it allows decides how many owners have rows of their own; what
            the others have is added up in one row, of the worker `OTHER`.
        clock: Tells the time, in seconds.
        further: How many of these may be others than the first of a source; None for all.
        """
        self.recorder = recorder
        self.clock = clock
        self.workers: dict[str, Worker] = {}
        self.resident = Tally()
        self.changed: set[Worker] = set()
        self._labels = {OTHER}
        owners = max(0, recorder.series_limit // CELLS - 1)
        self._room = Room(owners, owners if further is None else further, OTHER)
        self._maintained = recorder.level(semconv.INDEX_MAINTAINED, {})
        self._maintained.set(1)

    def share(self, source: str) -> Share:
        """Returns what a source may have of the room for rows: its first worker or rank always has some.

        Args:
            source: What and where it is, as the log is to say it.
        """
        return Share(self._room, source)

    def add(
        self,
        name: str,
        *,
        engine: str = AUTO,
        block_size: int | None = None,
        clears_device_only: bool | None = False,
        share: Share | None = None,
    ) -> Worker:
        """Adds a worker. What its events say has rows from the first on that names a rank.

        Args:
            name: What its rows call it.
            engine: What its events mean: ``vllm`` announces each copy of a block, ``sglang`` and any other does not;
                ``auto`` looks for what tells them apart.
            block_size: Tokens in a block of the device tier, where that is known; otherwise it is learned.
            clears_device_only: Whether "all blocks cleared" means the device's alone. Otherwise it empties every tier;
                None for what the engine means by it, which is the device with vLLM.
            share: The share of its first source; None for one of its own.

        Raises:
            ValueError: There is a worker of this name.
        """
        if name in self.workers:
            raise ValueError(f"there is a worker {printable(name)!r} already")
        share = share or self.share(repr(printable(name)))
        worker = self.workers[name] = Worker(
            self,
            name,
            self._label(name) if share.take() else OTHER,
            share,
            engine=engine,
            block_size=block_size,
            clears_device_only=clears_device_only,
        )
        return worker

    def release(self, name: str) -> None:
        """Ends a worker: its books, and every row about it, whoever writes it. Does nothing where there is none."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self.changed.discard(worker)
        ranks = len(worker.ranks)
        blocks, agreed = worker.close()
        if worker.label != OTHER:
            self.recorder.end(semconv.KVCACHE_WORKER, worker.label)
            self._labels.discard(worker.label)
        if agreed:
            _logger.info("kvcache: worker %r released, with %d blocks, ranks: %d", printable(name), blocks, ranks)
        else:
            self.recorder.accounting_error(Reason.RECOUNT)
            _logger.error(
                "kvcache: worker %r released, with %d blocks, ranks: %d, and its rows said something else",
                printable(name),
                blocks,
                ranks,
            )

    def bound(self) -> None:
        """Empties the fullest books, those of one worker and one medium, while all have more than `MOST_BLOCKS`."""
        if self.resident.blocks <= MOST_BLOCKS:  # Thousands of workers are not looked at every second.
            return
        books = {
            (worker, medium): blocks for worker in self.workers.values() for medium, blocks in worker.blocks().items()
        }
        while books and self.resident.blocks > MOST_BLOCKS:
            worker, medium = fullest = max(books, key=books.__getitem__)
            blocks = books.pop(fullest)
            worker.forget(medium)
            self.recorder.dropped(Reason.OTHER).add(blocks)
            _logger.error(
                "kvcache: worker %r has %d blocks in medium %r, and all workers more than %d: these are forgotten, and "
                "their row begins at zero again",
                printable(worker.name),
                blocks,
                medium,
                MOST_BLOCKS,
            )

    def fit(self) -> None:
        """Gives memory back that the books do not need; see `Book.fit`. To be called now and then: asking is quick."""
        changed, self.changed = self.changed, set()
        for worker in self.workers.values():  # In their order: what is given back in any other leaves more holes.
            if worker in changed:
                worker.fit()

    def close(self) -> None:
        """Releases every worker; from now on a row says that no index is kept."""
        for name in list(self.workers):
            self.release(name)
        self._maintained.set(0)

    def wrong_source(self) -> None:
        """Counts a source that cannot be one, or contradicts another."""
        labels: Labels = {semconv.KVCACHE_TELEMETRY_HOOK: "watch.sources"}
        self.recorder.counter(semconv.TELEMETRY_ERRORS, labels).add(1)

    def _label(self, name: str) -> str:
        label = text = printable(name) or "unnamed"
        number = 1
        while label in self._labels:  # Another that is the same as far as labels go, or a clever one.
            number += 1
            mark = f"~{number}"
            label = text[: LONGEST - len(mark)] + mark
        self._labels.add(label)
        return label
