"""What the engine's methods tell, in the words of kvcache-otel. The engine is not changed, and imports none of this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvcache_otel as kv
from examples.own_engine.engine import BYTES, TOKENS, Engine

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.engines.generic.handle import Instrumented


def measure(engine: Engine, meter_provider: MeterProvider | None = None) -> Instrumented:
    """Has an engine measured.

    Args:
        engine: The engine.
        meter_provider: Where the metrics go; None for where the ``OTEL_*`` variables say.

    Returns:
        The handle: what is measured, what is not, and the way back.
    """
    return kv.instrument_controller(
        engine,
        tiers={"device": "kv", "host": "kv"},
        methods={
            "admit": kv.Admission(
                prompt=lambda match, _: match.prompt,
                served=lambda match, _: {"device": len(match.device) * TOKENS, "host": len(match.host) * TOKENS},
            ),
            "load_back": kv.LoadBack(
                when=lambda _, call: call.blocks,
                tokens=lambda _, call: len(call.blocks) * TOKENS,
                bytes=lambda _, call: len(call.blocks) * BYTES,
            ),
            "write_back": kv.Backup(
                when=lambda new, _: new,
                tokens=lambda new, _: len(new) * TOKENS,
                bytes=lambda new, _: len(new) * BYTES,
            ),
            "make_room": kv.Eviction(tokens=lambda gone, _: len(gone) * TOKENS),
            "make_host_room": [
                kv.Eviction(tier="host", tokens=lambda gone, _: len(gone) * TOKENS),
                kv.Drop(tier="host", tokens=_lost, reason="host_pressure"),
            ],
        },
        gauges=kv.Gauges(
            resident={"device": lambda engine: len(engine.device), "host": lambda engine: len(engine.host)},
            block_size={"device": TOKENS, "host": TOKENS},
            pools={
                ("device", "kv"): kv.PoolSize(
                    limit=lambda engine: engine.device_blocks * TOKENS,
                    free=lambda engine: (engine.device_blocks - len(engine.device)) * TOKENS,
                ),
                ("host", "kv"): kv.PoolSize(
                    limit=lambda engine: engine.host_blocks * TOKENS,
                    free=lambda engine: (engine.host_blocks - len(engine.host)) * TOKENS,
                ),
            },
        ),
        meter_provider=meter_provider,
    )


def _lost(gone: list[int], call: Any) -> int:
    """Returns the tokens of blocks that are nowhere any more: the device may have what host memory forgets."""
    return sum(block not in call.self.device for block in gone) * TOKENS
