"""The medium that a KV event names, in the catalogue's words: whatever is on the wire, there are six."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, cast

from kvcache_otel.record.labels import LONGEST, REMEMBERED, printable
from kvcache_otel.semconv import KVCACHE_EVENT_MEDIUM, EventMedium, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

_logger = logging.getLogger(__name__)

_NAMES: Mapping[str, str] = {
    "GPU": EventMedium.DEVICE,
    "CPU": EventMedium.HOST,
    "CPU_PINNED": EventMedium.HOST,
    "CPU_TIER1": EventMedium.HOST,
    "CPU_TIER2": EventMedium.HOST,
    "DISK": EventMedium.DISK,
    "FS": EventMedium.DISK,
    "STORAGE": EventMedium.DISK,
    "OBJ": EventMedium.EXTERNAL,
    "EXTERNAL": EventMedium.EXTERNAL,
    "SHARED_STORAGE": EventMedium.EXTERNAL,
    "OBJECT_STORE": EventMedium.EXTERNAL,
}

# PyTorch's and JAX's names of accelerators, with or without a number.
_DEVICE = re.compile(r"(CUDA|GPU|HIP|ROCM|XPU|NPU|HPU|MUSA|MLU|MPS|MTIA|TPU|XLA)(:[0-9]+)?")

_TIERS: Mapping[str, str] = {
    EventMedium.DEVICE: Tier.DEVICE,
    EventMedium.HOST: Tier.HOST,
    EventMedium.DISK: Tier.DISK,
    EventMedium.EXTERNAL: Tier.EXTERNAL,
}

# Spellings of media that are known; a process meets a handful of them.
_SPELLINGS = 64


class Media:
    """Reads media, and remembers the first few that it meets."""

    def __init__(self) -> None:
        self._media: dict[object, str] = {None: EventMedium.UNTAGGED, **_NAMES}
        self._said: set[str] = set()

    def medium(self, value: object) -> str:
        """Returns the medium that a value stands for, one of `EventMedium`; raises nothing, whatever the value is.

        Args:
            value: What an event has for its medium; None where it has none.
        """
        try:
            return self._media[value]
        except Exception:  # New here, or nothing that can be looked up.
            return self._learn(value)

    def _learn(self, value: object) -> str:
        if not issubclass(type(value), str):
            return self._unknown(printable(type(value)))
        name = str.__str__(cast("str", value))  # Of a string enum this is the value, and of plain type.
        medium = _named(name)
        if medium is None:
            return self._unknown(printable(name))
        if len(self._media) < _SPELLINGS:
            self._media[name] = medium
        return medium

    def _unknown(self, name: str) -> str:
        if name not in self._said and len(self._said) < REMEMBERED:
            self._said.add(name)
            self._media[name] = EventMedium.UNKNOWN
            last = " (further unknown values are folded silently)" if len(self._said) == REMEMBERED else ""
            _logger.warning(
                "kvcache: %s=%r is not known; recorded as %r%s", KVCACHE_EVENT_MEDIUM, name, EventMedium.UNKNOWN, last
            )
        return EventMedium.UNKNOWN


def _named(name: str) -> str | None:
    if len(name) > LONGEST or not name.isascii():
        return None
    name = name.upper()
    return EventMedium.DEVICE if _DEVICE.fullmatch(name) else _NAMES.get(name)


medium = Media().medium
"""What every event of this process is read with."""


def tier(medium: str) -> str | None:
    """Returns the tier that a medium is in, or None where that is not known."""
    return _TIERS.get(medium)
