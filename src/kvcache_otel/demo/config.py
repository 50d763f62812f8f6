"""How large the cache is, and what it does when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

POLICIES = ("write_through", "write_back")
MEMORIES = ("auto", "torch", "numpy", "plain")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A cache's configuration. Sizes are in tokens, and whole pages of them.

    Attributes:
        device_tokens: Of the device tier.
        host_tokens: Of the host tier.
        disk_tokens: Of the disk tier; 0 for a cache without one.
        page_tokens: Of a page.
        token_bytes: Bytes of KV for one token, in every tier.
        policy: ``write_through`` copies a prefix to the host when it has been used often enough, ``write_back`` when it
            is evicted from the device.
        backup_after: How often write-through waits for a prefix to be used.
        prefetch_tokens: What the disk must have of a prompt, at the least, so that it is worth reading.
        directory: Where the disk tier has its file, which goes with the cache; None for the system's place.
        storage_thread: Whether the disk is read and written on a thread. Without one that happens while the cache is
            polled, one job at a time, so that a run is the same every time.
        queue_jobs: Jobs that may wait for the disk. Beyond that nothing more is written.
        memory: What pages of device and host are in: ``torch`` (CUDA where there is a GPU), ``numpy`` or ``plain``
            bytes; ``auto`` takes the first that is installed.
        events: Whether KV events are recorded, for `cache.TieredCache.publish`.
        verify: Whether bytes are checked after each round trip.
    """

    device_tokens: int = 4096
    host_tokens: int = 8192
    disk_tokens: int = 32768
    page_tokens: int = 16
    token_bytes: int = 64
    policy: str = "write_through"
    backup_after: int = 1
    prefetch_tokens: int = 32
    directory: str | Path | None = None
    storage_thread: bool = True
    queue_jobs: int = 64
    memory: str = "auto"
    events: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("policy", POLICIES), ("memory", MEMORIES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, and must be one of {', '.join(choices)}")
        for name in ("page_tokens", "token_bytes", "backup_after", "queue_jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be 1 or more")
        if self.prefetch_tokens < 0 or self.disk_tokens < 0:
            raise ValueError("disk_tokens and prefetch_tokens must not be negative")
        if self.page_bytes % 8:
            raise ValueError(
                f"a page has {self.page_bytes} bytes (page_tokens x token_bytes), and needs a multiple of 8"
            )
        for name in ("device_tokens", "host_tokens"):
            if self.pages(getattr(self, name)) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, less than one page of {self.page_tokens}")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_tokens * self.token_bytes

    def pages(self, tokens: int) -> int:
        """Returns how many whole pages fit into so many tokens."""
        return tokens // self.page_tokens
