"""A random walk: whatever a scheduler may ask of a cache, in any order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_otel.demo.cache import Request, TieredCache

PAGE = 4


class Walk:
    """Requests of a cache, and what happens to them.

    Attributes:
        draw: Draws what happens.
        waiting: Requests that have been submitted.
        running: Requests that run.
        retracted: Requests that are retracted.
        seen: Token sequences that there have been, so that prompts begin as others did.
    """

    def __init__(self, cache: TieredCache, seed: int) -> None:
        self.cache = cache
        self.draw = random.Random(seed)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self.seen: list[list[int]] = [[]]

    def take(self, steps: int) -> None:
        """Takes so many steps."""
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """Does something, and publishes what has happened."""
        draw = self.draw
        what = draw.choices(
            (self.submit, self.admit, self.extend, self.finish, self.retract, self.restore, self.cache.poll),
            (5, 6, 5, 5, 1, 2, 4),
        )[0]
        what()
        self.cache.publish()

    def submit(self) -> None:
        if len(self.waiting) < 4:
            before = self.draw.choice(self.seen)
            begin = before if self.draw.random() < 0.5 else before[: self.draw.randint(0, len(before))]
            prompt = (begin + [self.draw.randrange(50) for _ in range(self.draw.randint(1, 14))])[: 9 * PAGE]
            self.waiting.append(self.cache.submit(prompt))

    def admit(self) -> None:
        ready = [request for request in self.waiting if request.is_ready]
        if ready:
            request = self.draw.choice(ready)
            if self.cache.admit(request) is not None:
                self.waiting.remove(request)
                self.running.append(request)

    def extend(self) -> None:
        if self.running:
            request = self.draw.choice(self.running)
            if len(request.tokens) < 11 * PAGE:
                self.cache.extend(request, [self.draw.randrange(50) for _ in range(self.draw.randint(1, 6))])

    def finish(self) -> None:
        if self.running:
            request = self.running.pop(self.draw.randrange(len(self.running)))
            self.seen = [*self.seen[-11:], request.tokens]
            self.cache.finish(request)

    def retract(self) -> None:
        if self.running:
            request = self.running.pop(self.draw.randrange(len(self.running)))
            self.cache.retract(request)
            self.retracted.append(request)

    def restore(self) -> None:
        if self.retracted and self.cache.restore(self.retracted[0]):
            self.running.append(self.retracted.pop(0))

    def rest(self) -> None:
        """Ends all that goes on."""
        while self.waiting or self.running or self.retracted or self.cache.storage.going:
            self.cache.storage.wait()
            self.cache.poll()
            self.restore()
            self.admit()
            self.finish()
        self.cache.publish()
