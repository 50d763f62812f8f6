"""Signal handlers that raise in the midst of what is called."""

from __future__ import annotations

import gc
import random
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# CPython may see a signal late, where another thread got it.
_LATEST_S = 0.1


def interrupt(step: Callable[[], object], error: type[BaseException], seconds: float) -> tuple[int, int]:
    """Calls something again and again, for some seconds, while a handler raises an error now and then.

    Returns:
        How often it was raised, and how often it came out.
    """

    def handler(*_: object) -> None:
        fired.append(None)
        raise error

    def call_until_it_is_raised() -> None:  # Its own frame: 3.13 may raise at the end of a loop behind its `try`.
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 5e-4))
        before, end = len(fired), time.monotonic() + _LATEST_S
        while len(fired) == before and time.monotonic() < end:
            step()

    fired, got = list[None](), 0
    previous, until = signal.signal(signal.SIGALRM, handler), time.monotonic() + seconds
    gc.disable()  # What is raised in a callback of its, Python swallows.
    try:
        while time.monotonic() < until:
            try:
                call_until_it_is_raised()
            except error:
                got += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, previous)
    return len(fired), got
