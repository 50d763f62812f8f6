"""A workload: users who hold conversations of several turns, and a scheduler that has the cache serve them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.demo.cache import Request, TieredCache

VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the users do. The same shape on a cache without a storage thread is the same run every time.

    Attributes:
        users: How many there are.
        turns: Turns of a conversation, after which its user begins another.
        prefix: Tokens with which every conversation begins.
        turn_tokens: Tokens of a user's turn.
        output_tokens: Tokens of an answer.
        concurrency: Requests that run at the same time, at the most.
        decode_tokens: Tokens that each of them puts out in a step.
        think: Steps that a user thinks, on average, before the next turn.
        hold: Steps that a request keeps what it has after its answer, as while a tool is called.
        seed: Of all that is drawn.
    """

    users: int = 16
    turns: int = 6
    prefix: int = 128
    turn_tokens: int = 64
    output_tokens: int = 48
    concurrency: int = 6
    decode_tokens: int = 8
    think: int = 10
    hold: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "turns", "turn_tokens", "output_tokens", "concurrency", "decode_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be 1 or more")
        for name in ("prefix", "think", "hold"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, and must not be negative")


class User:
    """One of them.

    Attributes:
        tokens: The conversation so far.
        turn: Turns of it that are over.
        awake: The step at which there is another turn.
        left: Tokens of the answer that are still to come.
        done: The step at which the answer was complete.
    """

    def __init__(self, awake: int) -> None:
        self.tokens: list[int] = []
        self.turn = 0
        self.awake = awake
        self.left = 0
        self.done = 0


class Workload:
    """The scheduler, step by step.

    Attributes:
        cache: The cache.
        shape: What the users do.
        steps: Steps so far.
        admitted: Prompts that were admitted.
        turns: Answers that are complete.
        waiting: Requests that have been submitted and not admitted, in their order.
        running: Requests that run, the newest last.
        retracted: Requests that had to make room for others, the oldest first.
    """

    def __init__(self, cache: TieredCache, shape: Shape | None = None) -> None:
        """Args:
        cache: As the attribute.
        shape: As the attribute; None for the usual one.

        Raises:
            ValueError: The device is too small for the first turn of a conversation.
        """
        self.cache = cache
        self.shape = shape = shape or Shape()
        self.steps = self.admitted = self.turns = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self._longest = cache.device.limit * cache.config.page_tokens
        needed = shape.prefix + shape.turn_tokens + shape.output_tokens
        if needed > self._longest:
            raise ValueError(f"the device has {self._longest} tokens, and one turn of a conversation needs {needed}")
        self._random = random.Random(shape.seed)
        self._prefix = self._draw(shape.prefix)
        self._idle = [User(self._pause()) for _ in range(shape.users)]
        self._of: dict[int, User] = {}

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False, *, rate: float | None = None) -> None:
        """Takes steps for some time.

        Args:
            seconds: For how long.
            stop: Asked after each step whether that is enough.
            rate: Steps in a second, at the most; None for as many as there can be.
        """
        began = time.monotonic()
        first = self.steps
        while (now := time.monotonic()) < began + seconds and not stop():
            due = now if rate is None else began + (self.steps - first) / rate
            if due > now:
                time.sleep(min(due, began + seconds) - now)
                continue
            self.step()

    def step(self) -> None:
        """Takes a step: admits what it can, has every running request put out some tokens, publishes events."""
        self.steps += 1
        self.cache.poll()
        self._submit()
        self._restore()
        self._admit()
        for request in list(self.running):
            if request in self.running:
                self._decode(request)
        self.cache.publish()

    # ------------------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        for user in [user for user in self._idle if user.awake <= self.steps]:
            self._idle.remove(user)
            shape = self.shape
            if user.turn == shape.turns or len(user.tokens) + shape.turn_tokens + shape.output_tokens > self._longest:
                user.tokens, user.turn = [], 0
            if not user.turn:
                user.tokens = list(self._prefix)
            user.tokens += self._draw(shape.turn_tokens)
            user.left = shape.output_tokens
            request = self.cache.submit(user.tokens)
            self._of[request.number] = user
            self.waiting.append(request)

    def _restore(self) -> None:
        while self.retracted and len(self.running) < self.shape.concurrency:
            if not self.cache.restore(self.retracted[0]):
                break
            self.running.append(self.retracted.pop(0))

    def _admit(self) -> None:
        if self.retracted:  # They have waited for longer.
            return
        for request in [request for request in self.waiting if request.is_ready]:
            if len(self.running) >= self.shape.concurrency or self.cache.admit(request) is None:
                break
            self.waiting.remove(request)
            self.running.append(request)
            self.admitted += 1

    def _decode(self, request: Request) -> None:
        user = self._of[request.number]
        if user.left:
            tokens = self._draw(min(self.shape.decode_tokens, user.left))
            while not self.cache.extend(request, tokens):
                victim = self.running.pop()
                self.cache.retract(victim)
                self.retracted.append(victim)
                if victim is request:
                    return
            user.left -= len(tokens)
            user.done = self.steps
        if not user.left and self.steps >= user.done + self.shape.hold:
            self._finish(request, user)

    def _finish(self, request: Request, user: User) -> None:
        self.cache.finish(request)
        self.running.remove(request)
        self.turns += 1
        del self._of[request.number]
        user.tokens = request.tokens
        user.turn += 1
        user.awake = self.steps + self._pause()
        self._idle.append(user)

    def _pause(self) -> int:
        return 1 + (round(self._random.expovariate(1 / self.shape.think)) if self.shape.think else 0)

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]
