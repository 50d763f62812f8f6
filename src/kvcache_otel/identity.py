"""Who a series is about: the constant attributes of everything that one cache records."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache_otel import semconv


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank that owns a shard of the KV cache.

    Attributes:
        tp: Tensor-parallel rank, from 0.
        pp: Pipeline-parallel rank, from 0.
        dp: Data-parallel rank: the attention group's under DP attention, the replica's index under pure DP.
    """

    tp: int = 0
    pp: int = 0
    dp: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """The engine, the cache and the rank behind a series.

    Attributes:
        engine: ``vllm``, ``sglang`` or ``custom``.
        cache_type: The name of the class that defines the cache; one per process as a rule.
        rank: The rank that owns the shard.
    """

    engine: str
    cache_type: str
    rank: Rank = field(default_factory=Rank)

    def attributes(self) -> tuple[tuple[str, str | int], ...]:
        """Returns the constant attributes, in catalogue order."""
        return (
            (semconv.KVCACHE_ENGINE, self.engine),
            (semconv.KVCACHE_CACHE_TYPE, self.cache_type),
            (semconv.KVCACHE_RANK_TP, self.rank.tp),
            (semconv.KVCACHE_RANK_PP, self.rank.pp),
            (semconv.KVCACHE_RANK_DP, self.rank.dp),
        )
