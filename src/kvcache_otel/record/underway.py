"""The transfers of one direction that have begun: who does not end is counted, and none takes memory for ever.

Who does not end in time stays active, unless nobody has it any more: then nobody can end it.
"""

from __future__ import annotations

import time
from collections import deque
from sys import getrefcount
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_otel.record.complaints import Complaints
    from kvcache_otel.record.transfer import Transfer
    from kvcache_otel.record.transfers import Transfers

# References to a transfer that nobody else has: the deque's, the local name's and that of who counts them.
_NOBODY = 3

# Transfers that begin, at least, before it is worth a look which of them have ended.
A_FEW = 64


class Underway:
    """The transfers that have begun, until they are seen to have ended.

    Attributes:
        begun: The transfers, the oldest first. Who begins one adds it, and has it looked after when there are
            `look_at` of them: it is what every transfer pays, and a call less.
        look_at: How many there are when it is worth a look which of them have ended.
    """

    __slots__ = ("_complaints", "_deadline_s", "_limit", "begun", "look_at")

    def __init__(self, complaints: Complaints, deadline_s: float, limit: int) -> None:
        """Args:
        complaints: Counts those that do not end.
        deadline_s: After how many seconds one that has not ended is counted.
        limit: How many are looked after. Twice as many may be remembered until somebody looks.
        """
        self._complaints, self._deadline_s, self._limit = complaints, deadline_s, limit
        self.begun: deque[Transfer] = deque()
        self.look_at = A_FEW

    def __len__(self) -> int:
        return len(self.begun)

    def look_over(self) -> None:
        """Looks after them, on the engine's thread, and says when to do so again."""
        self.look_after()
        self.look_at = 2 * len(self.begun) + A_FEW  # So that each is looked at twice or so, however many there are.

    def look_after(self) -> None:
        """Forgets what has ended, and counts what should have; on any thread."""
        # Neither another thread nor a signal handler comes between a look at the first and what is done about it; as in
        # `cells`, nothing is called there.
        begun, since = self.begun, time.monotonic() - self._deadline_s
        for _ in range(len(begun)):  # All of them: behind one that takes long others may have ended.
            if not begun:  # Another thread took the last one.
                return
            oldest = begun[0]
            if oldest.ended:
                del begun[0]
                continue
            begun.rotate(-1)
            if oldest.began < since:
                held = getrefcount(oldest) > _NOBODY
                if not held:
                    oldest.abandon()
                if not oldest.overdue:
                    oldest.overdue = True
                    self._complaints.overdue(self._deadline_s, stays=held)
        for _ in range(len(begun) - self._limit):
            if not begun:
                return
            oldest = begun[0]
            del begun[0]
            if not oldest.ended and not oldest.overdue:
                self._complaints.unwatched(self._limit)

    def hand_to(self, transfers: Transfers) -> None:
        """Has all of them end with another `Transfers`, and forgets them."""
        for transfer in self.begun:
            transfer.belongs_to(transfers)
        self.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        self.begun.clear()
