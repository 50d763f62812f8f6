"""How much is remembered of what is under way, and what is said where that is too much."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from kvcache_otel.record.probe import CacheProbe

_logger = logging.getLogger(__name__)

# Requests or copies of which the end has not been told. SGLang has some thousands of them where its queue is deep. So
# many are there only where the hook that tells it has stepped aside; they take 300 MB at the most.
MOST = 1_000_000


class TooMany:
    """Says what was forgotten, once, and counts it. Its rows end, or say less; they are not wrong."""

    __slots__ = ("_probe", "_said", "_what")

    def __init__(self, probe: CacheProbe, what: str) -> None:
        """Args:
        probe: The cache's probe.
        what: What is remembered, in words.
        """
        self._probe, self._what, self._said = probe, what, False

    def forgotten(self, count: int) -> None:
        """Counts that so many of them are given up."""
        self._probe.lost(Reason.OTHER, count)
        if not self._said:
            self._said = True
            _logger.warning(
                "kvcache: %d %s were forgotten: nobody has said what became of them; see kvcache.telemetry.dropped",
                count,
                self._what,
            )
