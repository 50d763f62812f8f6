"""A cache of three tiers that knows no telemetry and keeps books of its own, for the tests to compare with."""

from __future__ import annotations

import threading
from collections import Counter
from queue import Queue
from typing import Any

PAGE = 4
BYTES = 32


class LittleCache:
    """Blocks by number, in the order of their use. What it does it also writes down in `truth`.

    Attributes:
        truth: What has happened, by what it is called in the tests.
        device: Blocks on the device, the oldest first.
        host: Blocks in host memory, the oldest first.
        disk: Blocks on the disk.
        fetched: Prefetches that are under way, by their number: blocks asked for, blocks that storage has.
    """

    def __init__(self, device: int, host: int, *, storage_thread: bool = False) -> None:
        self.truth: Counter[str] = Counter()
        self.device: dict[int, None] = {}
        self.host: dict[int, None] = {}
        self.disk: set[int] = set()
        self.fetched: dict[int, tuple[list[int], list[int]]] = {}
        self.device_blocks, self.host_blocks = device, host
        self._number = 0
        self._storing: dict[int, list[int]] = {}
        self._stored: list[int] = []
        self._jobs: Queue[tuple[int, list[int]] | None] = Queue()
        self._thread = threading.Thread(target=self._store_all) if storage_thread else None
        if self._thread is not None:
            self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    # What a controller does.

    def write_back(self, blocks: list[int]) -> list[int] | None:
        """Copies blocks to the host, as far as they are not there; returns them, or None where there are none."""
        new = [block for block in blocks if block not in self.host]
        if not new:
            return None
        if len(new) > self.host_blocks:
            self.truth["backup failures"] += 1
            raise MemoryError("host")
        self.trim_host(len(new))
        self.host.update(dict.fromkeys(new))
        self.truth["backups"] += 1
        self.truth["backup tokens"] += len(new) * PAGE
        return new

    def bring(self, blocks: list[int], *, urgent: bool = False) -> int:
        """Copies blocks that are on the host back to the device; returns how many."""
        there = [block for block in blocks if block in self.host and block not in self.device][: self.device_blocks]
        self.make_room(len(there))
        self.device.update(dict.fromkeys(there))
        self.truth["loads"] += 1
        self.truth["load tokens"] += len(there) * PAGE
        return len(there)

    def store(self, blocks: list[int]) -> int:
        """Has blocks of the host written to the disk, in the background; returns the job's number."""
        self._number += 1
        self.truth["stores begun"] += 1
        self._storing[self._number] = blocks
        self._jobs.put((self._number, blocks))
        if self._thread is None:
            self._store_one(*self._jobs.get())
        return self._number

    def poll(self) -> list[int]:
        """Returns the jobs that have ended since."""
        done, self._stored = self._stored, []
        for job in done:
            self.truth["stores"] += 1
            self.truth["store tokens"] += len(self._storing.pop(job)) * PAGE
        return done

    @property
    def storing(self) -> int:
        return len(self._storing)

    def ask_storage(self, blocks: list[int]) -> tuple[int, int]:
        """Asks the disk for blocks; returns the prefetch's number and how many it has."""
        hit = [block for block in blocks if block in self.disk]
        self._number += 1
        self.fetched[self._number] = blocks, hit
        self.truth["hit tokens"] += len(hit) * PAGE
        return self._number, len(hit)

    # What a tree does.

    def arrive(self, number: int) -> dict[str, Any]:
        """Puts what a prefetch brought into the host tier, as far as there is room."""
        _, hit = self.fetched.pop(number)
        usable = [block for block in hit if block not in self.host][: self.host_blocks]
        self.trim_host(len(usable))
        self.host.update(dict.fromkeys(usable))
        self.truth["loaded tokens"] += len(hit) * PAGE
        self.truth["fulfilled tokens"] += len(usable) * PAGE
        self.truth["unfulfilled tokens"] += (len(hit) - len(usable)) * PAGE
        return {"arrived": len(hit), "usable": len(usable)}

    def serve(self, prompt: list[int]) -> dict[str, int]:
        """Admits a prompt, and computes what no tier has; returns the blocks by tier."""
        served = {"device": sum(block in self.device for block in prompt)}
        served["host"] = sum(block in self.host and block not in self.device for block in prompt)
        missing = [block for block in prompt if block not in self.device]
        self.make_room(len(missing))
        self.device.update(dict.fromkeys(missing))
        self.truth["prompt"] += len(prompt) * PAGE
        for tier, blocks in served.items():
            self.truth[f"served {tier}"] += blocks * PAGE
        return served

    def make_room(self, blocks: int) -> list[int]:
        """Evicts from the device until so many blocks fit; returns those that are gone."""
        gone: list[int] = []
        while self.device and len(self.device) + blocks > self.device_blocks:
            block = next(iter(self.device))
            del self.device[block]
            gone.append(block)
        self.truth["device evictions"] += bool(gone)
        self.truth["device evicted tokens"] += len(gone) * PAGE
        lost = [block for block in gone if block not in self.host]
        if lost:
            self.lose(lost)
        return gone

    def lose(self, blocks: list[int]) -> None:
        self.truth["dropped tokens"] += len(blocks) * PAGE

    def trim_host(self, blocks: int) -> int:
        """Evicts from the host until so many blocks fit; returns how many are gone."""
        gone = 0
        while self.host and len(self.host) + blocks > self.host_blocks:
            del self.host[next(iter(self.host))]
            gone += 1
        self.truth["host evicted tokens"] += gone * PAGE
        return gone

    def _store_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._store_one(*job)

    def _store_one(self, number: int, blocks: list[int]) -> None:
        self.disk.update(blocks)
        self._stored.append(number)
