"""Event pairs of our own around a copy, for a device that has them where SGLang does not use them."""

from __future__ import annotations

import importlib
from typing import Any

from kvcache_otel.record.outside import let_through

_MODULE = "sglang.srt.mem_cache.l2_transfer"


class CopyClock:
    """Times the copies on one stream.

    SGLang does that itself wherever its device's events can be timed, and then there is nothing to do. Otherwise ours
    are tried once: a device whose events cannot be timed has no device time.

    Attributes:
        ticks: Whether copies will have a device time, by SGLang's events or by ours.
        ours: Whether by ours.
    """

    def __init__(self, transfer_engine: Any, stream: str) -> None:
        """Args:
        transfer_engine: SGLang's L2TransferEngine.
        stream: The attribute of it that holds the stream.
        """
        self._engine = transfer_engine
        self._stream = stream
        self._module: Any = importlib.import_module(_MODULE)
        theirs = self._sglang_times()
        self.ours = not theirs
        self.ticks: bool = theirs or self._event() is not None

    def begin(self) -> Any:
        """Records an event before a copy; returns None where SGLang does so, or nobody can."""
        return self._recorded() if self.ours else None

    def end(self, begun: Any) -> tuple[Any, Any] | None:
        """Records an event after the copy; returns it with the one before, or None where that failed."""
        ended = self._recorded()
        return None if ended is None else (begun, ended)

    def _sglang_times(self) -> bool:
        try:
            return bool(self._module._timing_events_supported())
        except Exception as error:  # SGLang asks the same, and will say what is wrong.
            let_through(error)
            return False

    def _recorded(self) -> Any:
        event = self._event()
        if event is not None:
            try:
                event.record(getattr(self._engine, self._stream))
            except Exception as error:
                let_through(error)
                self.ours, event = False, None
        return event

    def _event(self) -> Any:
        if self.ours:
            try:
                return self._module.device_module.Event(enable_timing=True)
            except Exception as error:  # What is raised depends on the device.
                let_through(error)
                self.ours = False
        return None
