"""A back-pressure configuration that is always under pressure, for whoever wants to see stores dropped."""

from __future__ import annotations

from typing import Any

ALWAYS: dict[str, Any] = {
    "backpressure_cls": "EMABackpressureDetector",
    "policy_cls": "DropStorePolicy",
    # Lower than any disk is fast; and the pressure never decays.
    "high_water_s": 1e-9,
    "low_water_s": 1e-10,
    "warmup_completions": 1,
    "decay_half_life_s": 0,
}
"""Drops every store once two have finished, until the cache is reset."""
