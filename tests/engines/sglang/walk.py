"""A random walk over all that can be done with a cache."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from tests.engines.sglang.cache_driver import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.engines.sglang.cache_driver import CacheDriver, Retracted

FAMILIES = 5
"""Conversations that share nothing."""

LONGEST = 8
"""Blocks of the longest prompt."""


def random_walk(driver: CacheDriver, seed: int, operations: int) -> Iterator[str]:
    """Do mixed operations on a cache, and yield the name of each after it and a step.

    What is done follows from the seed and from how the driver was made, the core aside: drivers of both cores do the
    same. With a storage, each operation waits for the one before to settle, so that it makes no difference how fast the
    storage's threads are; when the walk yields, they may be at work. When it ends, nothing is in flight.

    Args:
        driver: The driver, whose device and host have room for at least 16 blocks each.
        seed: What decides.
        operations: How many operations.
    """
    walk = _Walk(driver, random.Random(seed))
    for _ in range(operations):
        name = walk.operate()
        driver.step()
        yield name
    walk.end()


class _Walk:
    """The state of a random walk."""

    def __init__(self, driver: CacheDriver, rng: random.Random) -> None:
        self.driver = driver
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.retracted: list[Retracted] = []
        self.has_storage = driver.cache.enable_storage
        has_host = driver.cache.cache_controller is not None
        # What can be done, and how often it is, relative to the rest.
        self.weights: dict[Callable[[], None], int] = {
            self.insert: 60,
            self.admit: 20,
            self.admit_in_chunks: 6,
            self.match: 20,
            self.check: 10,
            self.evict: 25,
            self.reset: 1,
        }
        if has_host:
            self.weights.update({self.load_back: 40, self.evict_host: 12})
            if driver.can_retract:
                self.weights.update({self.retract_backup: 3, self.retract_restore: 3, self.retract_discard: 1})
        if self.has_storage:
            self.weights.update(
                {self.prefetch: 30, self.lose_prefetched: 4, self.abort_prefetch: 3, self.evict_host: 25}
            )

    def operate(self) -> str:
        """Do one operation, and return its name."""
        if self.has_storage:
            self.driver.settle()
        (operation,) = self.rng.choices(list(self.weights), list(self.weights.values()))
        operation()
        self.done[operation.__name__] += 1
        return operation.__name__

    def end(self) -> None:
        """Close what is open."""
        while self.retracted:
            self.retract_restore()
        self.driver.settle()

    def insert(self) -> None:
        self.driver.insert(self._blocks())

    def admit(self) -> None:
        self.driver.admit(self._prompt(), self._name())

    def admit_in_chunks(self) -> None:
        self.driver.admit_in_chunks(self._prompt(), self._name(), self.rng.randint(1, 4) * PAGE)

    def match(self) -> None:
        self.driver.match(self._blocks())

    def check(self) -> None:
        self.driver.check(self._blocks())

    def load_back(self) -> None:
        self.driver.load_back(self._blocks())

    def evict(self) -> None:
        self.driver.evict(self.rng.randint(1, 2 * LONGEST * PAGE))

    def evict_host(self) -> None:
        self.driver.evict_host(self.rng.randint(1, 2 * LONGEST * PAGE))

    def reset(self) -> None:
        self.driver.reset()
        self.retracted.clear()

    def prefetch(self) -> None:
        self.driver.prefetch(self._prompt(), self._name())

    def lose_prefetched(self) -> None:
        # The host's room goes to others before the request is admitted.
        request = self.driver.begin_prefetch(self._prompt(), self._name())
        while not self.driver.is_prefetched(request):
            self.driver.step()
        self.evict_host()
        self.driver.end_prefetch(request)

    def abort_prefetch(self) -> None:
        self.driver.abort(self.driver.begin_prefetch(self._prompt(), self._name()))

    def retract_backup(self) -> None:
        # Tokens that no prompt has.
        retracted = self.driver.retract_backup(range(10**6, 10**6 + self.rng.randint(2, 4 * PAGE)), self._name())
        if retracted is not None:
            self.retracted.append(retracted)

    def retract_restore(self) -> None:
        if self.retracted:
            self.driver.retract_restore(self.retracted.pop())

    def retract_discard(self) -> None:
        if self.retracted:
            self.driver.retract_discard(self.retracted.pop())

    # What the operations are made of.

    def _name(self) -> str:
        return f"request-{self.done.total()}"

    def _blocks(self) -> Sequence[int]:
        """The whole blocks of a prompt. Prompts of a family begin alike, and fork further on."""
        place = self.rng.randrange(FAMILIES)
        tokens: list[int] = []
        for _ in range(self.rng.randint(1, LONGEST)):
            # Each way through the forks has a number of its own.
            place = place * 2 + FAMILIES + (self.rng.random() < 0.2)
            tokens.extend(range(place * PAGE, (place + 1) * PAGE))
        return tokens

    def _prompt(self) -> Sequence[int]:
        """A prompt of whole blocks and a few tokens more."""
        return [*self._blocks(), *range(10**5, 10**5 + self.rng.randint(1, PAGE))]
