"""A table of what a Prometheus endpoint of kvcache-otel serves: the questions of someone who sees a cache for the first
time, and the series that answer them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WIDTH = 92
TIERS = ("device", "host", "disk", "peer", "external", "unknown", "none")


class Sample(NamedTuple):
    """One sample of a scrape."""

    name: str
    labels: Mapping[str, str]
    value: float


class Scrape:
    """The samples of one scrape, to be asked."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append(Sample(sample.name, sample.labels, sample.value))

    def all(self, name: str, **labels: str) -> Iterator[Sample]:
        """Yields the samples of a series that have these labels; names and labels go without ``kvcache_``."""
        wanted = {key if key == "le" else f"kvcache_{key}": value for key, value in labels.items()}.items()
        return (sample for sample in self._samples[f"kvcache_{name}"] if wanted <= sample.labels.items())

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples that have these labels."""
        return sum(sample.value for sample in self.all(name, **labels))

    def values(self, name: str, label: str) -> list[str]:
        """Returns the values that a label has in a series; tiers from the nearest to the farthest."""
        values = dict.fromkeys(sample.labels.get(f"kvcache_{label}", "") for sample in self.all(name))
        return sorted(values, key=lambda value: TIERS.index(value) if value in TIERS else -1)

    def quantile(self, name: str, share: float, **labels: str) -> float:
        """Returns the upper bound of the bucket that a histogram's quantile falls into, in the metric's unit."""
        buckets: dict[float, float] = defaultdict(float)
        for sample in self.all(f"{name}_bucket", **labels):
            buckets[float(sample.labels["le"])] += sample.value
        total = max(buckets.values(), default=0)
        return next((bound for bound in sorted(buckets) if total and buckets[bound] >= share * total), 0.0)


def render(text: str) -> str:
    """Returns the table of one scrape."""
    scrape = Scrape(text)
    return "\n\n".join(
        [
            _served(scrape),
            _holding(scrape),
            "  vLLM counts cached blocks that no request uses as free: see the blocks held. What the disk\n"
            "  holds it does not say.",
            _lookups(scrape),
            "  A tier is asked only for what the nearer ones do not have, and only up to the first block that\n"
            "  none of them has.",
            _moving(scrape),
            "  There is no device here: how long its copies take is made up.",
            _losing(scrape),
        ]
    ).replace("\n\n  ", "\n  ")


def _served(scrape: Scrape) -> str:
    prompt = scrape.sum("lookup_tokens_total")
    rows = [
        [_computed(tier), _whole(tokens), f"{tokens / prompt:.0%}" if prompt else "-"]
        for tier in scrape.values("lookup_tokens_total", "tier")
        if (tokens := scrape.sum("lookup_tokens_total", tier=tier)) or tier in ("device", "none")
    ]
    return _table("Where did prompt tokens come from?  kvcache_lookup_tokens_total", ["tier", "tokens", "share"], rows)


def _computed(tier: str) -> str:
    return "none: computed" if tier == "none" else tier


def _holding(scrape: Scrape) -> str:
    rows = []
    for tier in scrape.values("limit", "tier"):
        states = [_state(scrape, tier, state) for state in ("used", "evictable", "free")]
        held = scrape.sum("resident_blocks", tier=tier, view="held")
        size = scrape.sum("block_size", tier=tier)
        rows.append([tier, *states, _whole(scrape.sum("limit", tier=tier)), _whole(held), _whole(size)])
    head = ["tier", "used", "evictable", "free", "limit", "blocks held", "tokens/block"]
    return _table("How full are the tiers?  kvcache_usage, kvcache_limit, kvcache_resident_blocks", head, rows)


def _state(scrape: Scrape, tier: str, state: str) -> str:
    # vLLM does not tell the device's evictable blocks from its free ones: then there is no row, which is not zero.
    known = any(scrape.all("usage", tier=tier, state=state))
    return _whole(scrape.sum("usage", tier=tier, state=state)) if known else "-"


def _lookups(scrape: Scrape) -> str:
    rows = []
    for tier in scrape.values("lookup_blocks_total", "tier"):
        hits, misses = (scrape.sum("lookup_blocks_total", tier=tier, lookup_result=word) for word in ("hit", "miss"))
        waits = [
            _seconds(scrape.quantile("lookup_duration_seconds", 0.5, tier=tier, lookup_mode=mode))
            for mode in ("sync", "async")
        ]
        rows.append([tier, _whole(hits), _whole(misses), *waits])
    head = ["tier", "hits", "misses", "p50 blocking <=", "p50 deferred <="]
    return _table("What do lookups find, and at what cost?  kvcache_lookup_blocks_total", head, rows)


def _moving(scrape: Scrape) -> str:
    rows = []
    routes = {
        (sample.labels["kvcache_source_tier"], sample.labels["kvcache_destination_tier"])
        for sample in scrape.all("transfer_operations_total")
    }
    for source, destination in sorted(routes, key=lambda route: [TIERS.index(tier) for tier in route]):
        route = {"source_tier": source, "destination_tier": destination}
        count = scrape.sum("transfer_duration_seconds_count", **route)
        moved, busy = (
            scrape.sum("transfer_io_bytes_total", **route),
            scrape.sum("transfer_duration_seconds_sum", **route),
        )
        times = [_seconds(scrape.quantile("transfer_duration_seconds", share, **route)) for share in (0.5, 0.99)]
        speed = f"{moved / busy / 1e6:.0f} MB/s" if busy else "-"
        rows.append([f"{source} -> {destination}", _whole(count), f"{moved / 1e6:.2f} MB", *times, speed])
    head = ["route", "transfers", "moved", "p50 <=", "p99 <=", "each, moving"]
    return _table("What moves between tiers, and how fast?  kvcache_transfer_*", head, rows)


def _losing(scrape: Scrape) -> str:
    rows = [
        [f"evicted from {tier}", _whole(scrape.sum("eviction_tokens_total", tier=tier)), "tokens"]
        for tier in scrape.values("eviction_tokens_total", "tier")
    ]
    for name, what, unit in (
        ("store_skipped_blocks_total", "not stored", "blocks"),
        ("allocation_failures_total", "no room for", "times"),
    ):
        for reason in scrape.values(name, "reason"):
            rows.append([f"{what}: {reason}", _whole(scrape.sum(name, reason=reason)), unit])
    rows.append(["failed transfers", _whole(_failed(scrape)), "transfers"])
    return _table("What is lost?  kvcache_eviction_*, kvcache_store_*, kvcache_allocation_*", ["what", "", ""], rows)


def _failed(scrape: Scrape) -> float:
    return sum(sample.value for sample in scrape.all("transfer_operations_total") if sample.labels.get("error_type"))


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = [title, "-" * min(WIDTH, max(len(title), sum(widths) + 2 * len(widths)))]
    for line in (head, *rows) if any(head[1:]) else rows:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([line[0].ljust(len(first)), *others]))
    return "\n".join(lines)


def _whole(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def _seconds(number: float) -> str:
    if number == 0:
        return "-"
    return f"{number * 1e6:.0f} us" if number < 1e-3 else f"{number * 1e3:.0f} ms" if number < 1 else f"{number:.0f} s"
