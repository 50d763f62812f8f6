"""A plain subscriber of vLLM's KV events: what anybody would add up who reads vLLM's documentation, without us."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import zmq


class Subscriber:
    """Adds up what a publisher sends: each announced copy counts, a removal takes one away.

    Attributes:
        events: Events by type and medium.
        blocks: The hashes that they carried, by type and medium.
        missing: Removals of what was not there.
    """

    def __init__(self, endpoint: str, topic: str = "") -> None:
        """Args:
        endpoint: Where the publisher is, or will be.
        topic: What to listen to.
        """
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._next = 0
        self._copies: dict[str | None, Counter[Any]] = {}
        self.events: Counter[tuple[str, str | None]] = Counter()
        self.blocks: Counter[tuple[str, str | None]] = Counter()
        self.missing = 0

    def listen(self, quiet_ms: int = 300) -> None:
        """Takes what has come, until nothing does for a while."""
        while self._socket.poll(quiet_ms):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._next, "a batch was lost on the way"
            self._next += 1
            _, events, _ = msgspec.msgpack.decode(payload)
            for event in events:
                self._apply(event)

    def resident(self, medium: str) -> int:
        """The distinct blocks in a medium. Each group of layers has blocks of its own under the same hash."""
        return len(self._copies.get(medium, ()))

    def close(self) -> None:
        self._socket.close(0)

    def _apply(self, event: dict[str, Any]) -> None:
        kind, medium = event["type"], event.get("medium")
        hashes = event.get("block_hashes", ())
        self.events[kind, medium] += 1
        self.blocks[kind, medium] += len(hashes)
        if kind == "AllBlocksCleared":
            self._copies.pop("GPU", None)
            return
        copies = self._copies.setdefault(medium, Counter())
        for block in hashes:
            key = (block, event.get("group_idx"))
            if kind == "BlockStored":
                copies[key] += 1
            elif key not in copies:
                self.missing += 1
            elif copies[key] == 1:
                del copies[key]
            else:
                copies[key] -= 1
