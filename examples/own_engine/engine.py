"""An engine as small as one can be: a prefix cache of two tiers. It knows nothing of telemetry.

The device forgets what was used longest ago, and writes it back to host memory before; the host forgets for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TOKENS = 16
"""Of one block."""

BYTES = 4096
"""Of the keys and values of one block."""

Blocks = list[int]
"""Blocks by the hash of all tokens up to their end."""


class Match(NamedTuple):
    """What the tiers have of a prompt: a prefix of it on the device, and what follows in host memory."""

    prompt: int
    device: Blocks
    host: Blocks


class Engine:
    """Answers prompts.

    Attributes:
        device: What the device holds, the block that was used longest ago first.
        host: What host memory holds, in the same order.
    """

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self.device: dict[int, bytearray] = {}
        self.host: dict[int, bytearray] = {}
        self.device_blocks, self.host_blocks = device_blocks, host_blocks

    def generate(self, prompt: Sequence[int]) -> bytes:
        """Returns the answer to a prompt, which depends on all of its keys and values."""
        blocks = _blocks(prompt)
        if len(blocks) > self.device_blocks:
            raise ValueError(f"{len(prompt)} tokens: the device has room for {self.device_blocks * TOKENS}")
        match = self.admit(len(prompt), blocks)
        _use(self.device, match.device)
        _use(self.host, match.host)
        self.load_back(match.host)
        computed = blocks[len(match.device) + len(match.host) :]
        self.make_room(len(computed))
        self.device |= {block: _compute(block) for block in computed}
        return bytes(self.device[block][0] for block in blocks)

    def admit(self, prompt: int, blocks: Blocks) -> Match:
        """Looks up how much of a prompt the tiers have."""
        device = _prefix(blocks, self.device)
        return Match(prompt, device, _prefix(blocks[len(device) :], self.host))

    def load_back(self, blocks: Blocks) -> None:
        """Copies blocks from host memory to the device."""
        copies = {block: bytearray(self.host[block]) for block in blocks}
        self.make_room(len(blocks))  # What it writes back may take the place of what was just copied.
        self.device |= copies

    def write_back(self, blocks: Blocks) -> Blocks:
        """Copies blocks from the device to host memory, where they are not there; returns those that were not."""
        new = [block for block in blocks if block not in self.host][-self.host_blocks :]
        self.make_host_room(len(new))
        self.host |= {block: bytearray(self.device[block]) for block in new}
        return new

    def make_room(self, count: int) -> Blocks:
        """Evicts from the device until so many blocks fit; returns what is gone."""
        gone = _oldest(self.device, len(self.device) + count - self.device_blocks)
        self.write_back(gone)
        for block in gone:
            del self.device[block]
        return gone

    def make_host_room(self, count: int) -> Blocks:
        """Evicts from host memory until so many blocks fit; returns what is gone."""
        gone = _oldest(self.host, len(self.host) + count - self.host_blocks)
        for block in gone:
            del self.host[block]
        return gone


def _blocks(prompt: Sequence[int]) -> Blocks:
    blocks: Blocks = []
    for end in range(TOKENS, len(prompt) + 1, TOKENS):
        blocks.append(hash((blocks[-1] if blocks else 0, *prompt[end - TOKENS : end])))
    return blocks


def _compute(block: int) -> bytearray:
    return bytearray([block % 256]) * BYTES


def _prefix(blocks: Blocks, tier: dict[int, bytearray]) -> Blocks:
    return blocks[: next((place for place, block in enumerate(blocks) if block not in tier), len(blocks))]


def _oldest(tier: dict[int, bytearray], count: int) -> Blocks:
    return list(tier)[: max(count, 0)]


def _use(tier: dict[int, bytearray], blocks: Iterable[int]) -> None:
    for block in blocks:
        tier[block] = tier.pop(block)
