"""The disk tier, and the thread that reads and writes it.

The thread moves bytes and nothing else. What is on the disk is known by the scheduler's thread alone, which finds out
that a job has ended when it polls.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from queue import Queue
from typing import TYPE_CHECKING

from kvcache_otel.demo.memory import FileMemory, Pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.demo.books import Books
    from kvcache_otel.demo.config import Config
    from kvcache_otel.demo.memory import Lane
    from kvcache_otel.demo.pages import Page


class Job:
    """A copy between host and disk.

    Attributes:
        writes: Whether it goes to the disk.
        pages: What is copied.
        slots: Where on the disk.
        host: Where in host memory.
        since: Since when it has been wanted, by `time.monotonic`.
        error: What went wrong; empty where nothing did.
    """

    def __init__(self, pages: list[Page], slots: list[int], host: list[int], *, writes: bool) -> None:
        """Args:
        pages: As the attribute.
        slots: As the attribute.
        host: As the attribute.
        writes: As the attribute.
        """
        self.writes = writes
        self.pages = pages
        self.slots = slots
        self.host = host
        self.since = time.monotonic()
        self.error = ""


class Storage:
    """The disk.

    Attributes:
        pool: Its pages.
        index: What is on it and where, by the page's hash, the longest unused first.
        readers: How many jobs read each page, by its hash.
        going: Jobs that have not been seen to have ended.
        working: Held while a job is run: whoever has it is between two of them.
        jobs: Jobs that wait for the thread.
    """

    def __init__(self, config: Config, host: Pool, lane: Lane, books: Books) -> None:
        """Args:
        config: Its size, where its file is, and whether there is a thread.
        host: Where it copies from and to.
        lane: What copies into host memory run on.
        books: Where copies are counted.
        """
        pages = config.pages(config.disk_tokens)
        self.pool = Pool(pages, FileMemory(pages, config.page_bytes, config.directory))
        self.index: OrderedDict[int, tuple[Page, int]] = OrderedDict()
        self.readers: Counter[int] = Counter()
        self.going: list[Job] = []
        self.working = threading.Lock()
        self.jobs: Queue[Job | None] = Queue()
        self._done: deque[Job] = deque()
        self._writing: set[int] = set()
        self._queue_jobs = config.queue_jobs
        self._host, self._lane, self._books = host, lane, books
        self._thread: threading.Thread | None = None
        if config.storage_thread and pages:
            self._thread = threading.Thread(target=_work, args=(self,), name="demo-storage", daemon=True)
            self._thread.start()

    # -- on the scheduler's thread -------------------------------------------------------------------------------------

    def has(self, key: int) -> bool:
        """Returns whether a page is on the disk, or will be before it is gone from the host."""
        return key in self.index or key in self._writing

    def find(self, pages: Sequence[Page]) -> int:
        """Returns how many of these pages in a row the disk has, from the first on."""
        return next((at for at, page in enumerate(pages) if page.hash not in self.index), len(pages))

    @property
    def is_busy(self) -> bool:
        """Whether so many jobs are going on that nothing more should be written."""
        return len(self.going) >= self._queue_jobs

    @property
    def evictable(self) -> int:
        """How many pages could be evicted."""
        return len(self.index) - len(self.readers)

    def oldest(self, count: int) -> list[Page]:
        """Returns the pages that have not been used for longest and that nobody reads, so many at the most."""
        found: list[Page] = []
        for key, (page, _) in self.index.items():
            if len(found) == count:
                break
            if not self.readers[key]:
                found.append(page)
        return found

    def forget(self, pages: Sequence[Page]) -> None:
        """Frees the room of pages."""
        self.pool.give([self.index.pop(page.hash)[1] for page in pages])

    def write(self, pages: list[Page], host: list[int]) -> Job:
        """Has pages written for which there is room; returns the job."""
        slots = self.pool.take(len(pages))
        assert slots is not None, "room was not made"
        self._writing.update(page.hash for page in pages)
        return self._submit(Job(pages, slots, host, writes=True))

    def read(self, pages: list[Page], host: list[int]) -> Job:
        """Has pages read that are on the disk; returns the job."""
        for page in pages:
            self.readers[page.hash] += 1
            self.index.move_to_end(page.hash)
        return self._submit(Job(pages, [self.index[page.hash][1] for page in pages], host, writes=False))

    def poll(self) -> list[Job]:
        """Returns the jobs that have ended since; what was written without an error is on the disk from now on."""
        if self._thread is None and not self.jobs.empty():
            self.run(self.jobs.get())
        ended: list[Job] = []
        while self._done:
            job = self._done.popleft()
            self.going.remove(job)
            ended.append(job)
            if job.writes:
                self._written(job)
            else:
                self._let_go(job.pages)
        return ended

    def wait(self) -> None:
        """Waits until the thread has done all that it was given."""
        if self._thread is not None:
            self.jobs.join()

    def close(self) -> None:
        """Ends the thread after what it was given, and the file with it."""
        if self._thread is not None:
            self.jobs.put(None)
            self._thread.join()
        assert isinstance(self.pool.memory, FileMemory)
        self.pool.memory.close()

    def _submit(self, job: Job) -> Job:
        self.going.append(job)
        self.jobs.put(job)
        return job

    def _let_go(self, pages: list[Page]) -> None:
        for page in pages:
            self.readers[page.hash] -= 1
            if not self.readers[page.hash]:
                del self.readers[page.hash]

    def _written(self, job: Job) -> None:
        self._writing.difference_update(page.hash for page in job.pages)
        if job.error:
            self.pool.give(job.slots)
        else:
            self.index.update((page.hash, (page, slot)) for page, slot in zip(job.pages, job.slots, strict=True))

    # -- on the storage thread, where there is one ---------------------------------------------------------------------

    def run(self, job: Job | None) -> None:
        """Runs one job, and says that it has ended."""
        if job is None:
            return
        with self.working:
            try:
                self.to_disk(job) if job.writes else self.to_host(job)
            except Exception as error:  # A disk that fails is no reason for an engine to end.
                job.error = type(error).__name__
                self._books.add("copies failed", *(("host", "disk") if job.writes else ("disk", "host")), job.error)
            self._done.append(job)

    def to_disk(self, job: Job) -> None:
        """Copies pages from host memory."""
        self._lane.wait()
        self.pool.memory.copy(job.slots, self._host.memory, job.host)
        self._books.copied("host", "disk", len(job.pages), self.pool.memory.page_bytes)

    def to_host(self, job: Job) -> None:
        """Copies pages into host memory."""
        self._lane.wait()
        self._host.memory.copy(job.host, self.pool.memory, job.slots)
        self._books.copied("disk", "host", len(job.pages), self.pool.memory.page_bytes)


def _work(storage: Storage) -> None:
    job: Job | None = None
    while (job := storage.jobs.get()) is not None:
        storage.run(job)
        storage.jobs.task_done()
    storage.jobs.task_done()
