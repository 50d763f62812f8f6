"""What a cache of one's own may look like so that nothing has to be said about it but its tiers.

A method that has one of these names and returns what it says here is read as it is. Every other is described by a fact
with callables that read the same from whatever it returns. None says that nothing happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Copied(Protocol):
    """What a copy between two tiers hands over."""

    @property
    def tokens(self) -> int | Mapping[str, int]:
        """Tokens copied: by pool, or of the first pool of the source tier."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes copied, every pool and sidecar included."""
        ...


class Evicted(Protocol):
    """What an eviction pass hands over."""

    @property
    def tokens(self) -> int | Mapping[str, int]:
        """Tokens whose slots it freed, backed up or not: by pool, or of the first pool of the tier."""
        ...


class Dropped(Evicted, Protocol):
    """What the destruction of KV hands over of which no copy is left in a lower tier."""

    @property
    def reason(self) -> str:
        """Why: ``host_pressure``, ``write_through_unbacked_eviction``, ``pool_full`` or ``other``."""
        ...


class Prefetched(Protocol):
    """What a prefetch hands over when storage was asked."""

    @property
    def hit(self) -> int:
        """Tokens that storage said it had."""
        ...


class Inserted(Protocol):
    """What the insertion of a prefetch into the host tier hands over: fulfilled + unfulfilled = what was hit."""

    @property
    def loaded(self) -> int:
        """Tokens that arrived in host memory."""
        ...

    @property
    def fulfilled(self) -> int:
        """Of the hit, tokens that became usable prefix."""
        ...

    @property
    def unfulfilled(self) -> Mapping[str, int]:
        """Of the hit, tokens that did not, by reason."""
        ...


class Admitted(Protocol):
    """What the admission of a request hands over, once for each request."""

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def served(self) -> Mapping[str, int]:
        """Tokens by the tier that served them; the rest is computed."""
        ...


class CacheController(Protocol):
    """What moves KV between tiers. It need not have all of this; what it lacks is reported."""

    def backup(self, *args: Any, **kwargs: Any) -> Copied | None:
        """Copies from device to host."""
        ...

    def load_back(self, *args: Any, **kwargs: Any) -> Copied | None:
        """Copies from host to device."""
        ...

    def retract(self, *args: Any, **kwargs: Any) -> Copied | None:
        """Copies what a retracted request holds from device to host."""
        ...

    def restore(self, *args: Any, **kwargs: Any) -> Copied | None:
        """Copies what a retracted request held back to the device."""
        ...

    def prefetch(self, *args: Any, **kwargs: Any) -> Prefetched | None:
        """Asks storage for a prefix."""
        ...


class TreeCore(Protocol):
    """What knows which tier holds what. It need not have all of this; what it lacks is reported."""

    def admit(self, *args: Any, **kwargs: Any) -> Admitted | None:
        """Takes the prefix that a request is admitted with."""
        ...

    def evict(self, *args: Any, **kwargs: Any) -> Evicted | None:
        """Frees slots on the device."""
        ...

    def evict_host(self, *args: Any, **kwargs: Any) -> Evicted | None:
        """Frees slots in host memory."""
        ...

    def drop(self, *args: Any, **kwargs: Any) -> Dropped | None:
        """Destroys KV on the device of which there is no copy below."""
        ...

    def insert_host(self, *args: Any, **kwargs: Any) -> Inserted | None:
        """Puts what a prefetch brought into the tree."""
        ...
