"""How commands that go on end: after some seconds, or when they are told to."""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class Stop:
    """Whether the process was told to end.

    Attributes:
        asked: Whether it was.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # As nohup has it.
            signal.signal(signal.SIGHUP, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # A second time: whatever it is that does not end.
            raise KeyboardInterrupt
        self.asked = True


def seconds(text: str) -> float:
    """Reads a number of seconds from a command line.

    Raises:
        argparse.ArgumentTypeError: It is none above 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number
