"""What `kvcache-otel demo` shows, compared with what was written into the rows."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import TYPE_CHECKING

import pytest

from kvcache_otel import semconv
from kvcache_otel.cli import demo_rows, demo_view
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder

if TYPE_CHECKING:
    from kvcache_otel.record.cells import Level
    from kvcache_otel.record.probe import Pool, Route

BOUNDS = semconv.DURATION_BOUNDS


class Filled:
    """A recorder with rows of every kind that the view reads.

    Attributes:
        recorder: The recorder.
        probe: Writes to it.
        kept: What ends its row when nobody keeps it.
    """

    def __init__(self) -> None:
        identity = Identity("custom", "TestView")
        self.recorder = Recorder(identity)
        self.probe = CacheProbe(self.recorder, identity)
        self.kept: list[Level | Pool | Route] = []

    def fill(self, scale: int = 1) -> None:
        """Writes numbers, each of them another."""
        probe = self.probe
        probe.served("device", "host", "disk").prompt(
            1000 * scale, {"device": 300 * scale, "host": 200 * scale, "disk": 7}
        )
        for tier, limit in (("device", 4096 * scale), ("host", 8192 * scale)):
            pool = probe.pool(tier, "kv")
            pool.settle(limit, limit // 4, limit // 4 + 1)
            held, published = probe.resident(tier, "held"), probe.resident(tier, "published")
            held.set(limit // 16)
            published.set(limit // 16 - 1)
            probe.evictions(tier, "kv").add(limit + 3)
            self.kept += [pool, held, published]
        down, up = probe.route("device", "host", timing="device_event"), probe.route("host", "device")
        for seconds in (0.001, 0.0011, 0.003, 1.5):
            down.duration.record(seconds)
            down.moved.add(1_000_000 * scale)
        down.active.set(2)
        up.failures("OSError").add(4)
        self.kept += [down, up]
        probe.dropped("host", "kv", "host_pressure").add(48 * scale)
        probe.dropped("host", "kv", "other")
        probe.skipped_stores("disk", "already_stored").add(9)
        probe.skipped_stores("disk", "backpressure").add(5)
        probe.allocation_failures("host", "store").add(6)
        fetched = probe.prefetches("disk", reasons=("host_capacity",))
        fetched.hit.add(100)
        fetched.fulfilled.add(60)
        fetched.unfulfilled("host_capacity").add(30)
        fetched.outstanding.set(10)
        self.kept.append(fetched.outstanding)


@pytest.fixture
def filled() -> Filled:
    made = Filled()
    made.fill()
    return made


def test_every_number_is_that_of_its_row(filled: Filled) -> None:
    seen = demo_rows.read(filled.recorder)
    assert (seen.prompt, seen.computed) == (1000, 493)
    device, host, disk = seen.tiers
    assert device == ("device", 300, 2047, 1025, 1024, 4096, 256, 255, 4099)
    assert host == ("host", 200, 4095, 2049, 2048, 8192, 512, 511, 8195)
    assert disk == ("disk", 7, None, None, None, None, None, None, None)
    down, up = seen.routes
    assert down == ("device", "host", "device_event", 4, 4_000_000, 1.5051, 0.002, 2.0, 2, 0)
    assert down.bandwidth == pytest.approx(4_000_000 / 1.5051)
    assert up == ("host", "device", "wall_clock", 0, 0, 0.0, None, None, 0, 4)
    assert up.bandwidth is None
    assert sorted(seen.losses) == [
        ("dropped", "host", "host_pressure", 48, "token"),
        ("dropped", "host", "other", 0, "token"),
        ("no room", "host", "store", 6, "failure"),
        ("not needed", "disk", "already_stored", 9, "block"),
        ("not stored", "disk", "backpressure", 5, "block"),
        ("prefetch unfulfilled", "disk", "host_capacity", 30, "token"),
    ]
    assert seen.prefetch == {"hit": 100, "fulfilled": 60, "unfulfilled": 30, "outstanding": 10}
    assert seen.doubts == {}


def test_what_throws_doubt_on_the_numbers_is_shown(filled: Filled) -> None:
    filled.recorder.accounting_error("underflow", 3)
    filled.recorder.failed("transfer", "something", ValueError())
    seen = demo_rows.read(filled.recorder)
    assert seen.doubts == {"kvcache.accounting.errors underflow": 3, "kvcache.telemetry.errors transfer": 1}
    shown = "\n".join(map(demo_view.text, demo_view.tables(seen)))
    assert "these numbers may be wrong" in shown
    assert "wrong=kvcache.accounting.errors:underflow times=3" in list(demo_view.lines(seen, 0.0))


def test_rows_of_several_ranks_add_up(filled: Filled) -> None:
    other = CacheProbe(filled.recorder, Identity("custom", "Another"))
    other.served("device").prompt(10, {"device": 4})
    other.route("device", "host", timing="device_event").duration.record(0.001)
    seen = demo_rows.read(filled.recorder)
    assert (seen.prompt, seen.computed, seen.tiers[0].served) == (1010, 499, 304)
    assert seen.routes[0].transfers == 5
    assert seen.routes[0].p50 == 0.002


@pytest.mark.parametrize("seed", range(20))
def test_a_quantile_is_the_bound_of_the_bucket_that_the_sorted_samples_say(seed: int) -> None:
    rng = random.Random(seed)
    samples = sorted(10 ** rng.uniform(-6, 2) for _ in range(rng.randint(1, 300)))
    counts = [0] * (len(BOUNDS) + 1)
    for sample in samples:
        counts[bisect_left(BOUNDS, sample)] += 1
    for share in (0.5, 0.99):
        # The smallest sample that so many are at or below, and the bucket that it is in.
        reached = next(sample for place, sample in enumerate(samples, 1) if place >= share * len(samples))
        assert demo_rows.quantile(BOUNDS, counts, share) == (*BOUNDS, float("inf"))[bisect_left(BOUNDS, reached)]


def test_no_samples_have_no_quantile() -> None:
    assert demo_rows.quantile(BOUNDS, [0] * (len(BOUNDS) + 1), 0.5) is None


def test_tables_show_the_numbers(filled: Filled) -> None:
    tiers, routes, lost = demo_view.tables(demo_rows.read(filled.recorder))
    assert [row[:3] for row in tiers.rows] == [
        ("device", "300", "30%"),
        ("host", "200", "20%"),
        ("disk", "7", "1%"),
        ("computed", "493", "49%"),
    ]
    assert [row[4:] for row in tiers.rows[:2]] == [
        ("4,096", "4,099", "256", "255"),
        ("8,192", "8,195", "512", "511"),
    ]
    # 2,047 and 1,025 of 4,096 tokens, in 14 columns.
    assert tiers.rows[0][3] == "███████▒▒▒····"
    assert tiers.rows[2][3:] == ("-", "-", "-", "-", "-")
    assert routes.rows == [("device -> host", "device event", "4", "4.0 MB", "2 ms", "2 s", "2.7 MB/s", "2")]
    assert lost.head[0] == "lost or left undone"
    assert lost.rows == [  # What was there already comes last, and is no loss.
        ("failed", "host -> device", "4 transfers"),
        ("dropped", "host host_pressure", "48 tokens"),
        ("no room", "host store", "6 failures"),
        ("not stored", "disk backpressure", "5 blocks"),
        ("prefetch unfulfilled", "disk host_capacity", "30 tokens"),
        ("not needed", "disk already_stored", "9 blocks"),
    ]
    told = demo_view.prefetched(demo_rows.read(filled.recorder))
    assert told == "storage had 100 tokens: 60 fulfilled, 30 unfulfilled, 10 outstanding"


@pytest.mark.parametrize("scale", [1, 1000, 10**7])
def test_nothing_is_wider_than_80_columns(scale: int) -> None:
    filled = Filled()
    filled.fill(scale)
    for table in demo_view.tables(demo_rows.read(filled.recorder)):
        assert max(map(len, demo_view.text(table).splitlines())) <= 80
    assert len(demo_view.prefetched(demo_rows.read(filled.recorder))) <= 80


@pytest.mark.parametrize("scale", [1, 10**7])
@pytest.mark.parametrize("width", range(32, 84, 4))
def test_a_narrow_terminal_leaves_columns_out_and_cuts_no_number(scale: int, width: int) -> None:
    filled = Filled()
    filled.fill(scale)
    for table in demo_view.tables(demo_rows.read(filled.recorder)):
        found, left_out = demo_view.fitted(table, width)
        assert max(map(len, demo_view.text(found).splitlines())) <= width
        assert [head for head in table.head if head not in left_out] == list(found.head)
        assert left_out == [] or width < 80
        for before, after in zip(table.rows, found.rows, strict=True):
            kept = dict(zip(table.head, before, strict=True))
            for head, cell in zip(found.head, after, strict=True):
                assert cell == kept[head] or (head == "why" and "…" in cell)


def test_a_cache_that_has_nothing_is_shown_too() -> None:
    seen = demo_rows.read(Recorder(Identity("custom", "Nothing")))
    assert seen == (0, 0, [], [], [], {}, {})
    shown = "\n".join(map(demo_view.text, demo_view.tables(seen)))
    assert "computed       0      -" in shown
    assert list(demo_view.lines(seen, 0.0)) == ["at=0.0 prompt=0 computed=0"]


def test_lines_say_what_their_numbers_are(filled: Filled) -> None:
    assert list(demo_view.lines(demo_rows.read(filled.recorder), 12.34)) == [
        "at=12.3 prompt=1000 computed=493",
        "tier=device served=300 used=2047 evictable=1025 free=1024 limit=4096 held=256 published=255 evicted=4099",
        "tier=host served=200 used=4095 evictable=2049 free=2048 limit=8192 held=512 published=511 evicted=8195",
        "tier=disk served=7",
        "source=device destination=host clock=device_event transfers=4 bytes=4000000 seconds=1.5051 p50_le=0.002 "
        "p99_le=2.0 active=2 failed=0 bytes_per_second=2657631",
        "source=host destination=device clock=wall_clock transfers=0 bytes=0 seconds=0.0 active=0 failed=4",
        "lost=dropped tier=host reason=host_pressure amount=48 unit=token",
        "undone=no_room tier=host reason=store amount=6 unit=failure",
        "undone=not_stored tier=disk reason=backpressure amount=5 unit=block",
        "undone=prefetch_unfulfilled tier=disk reason=host_capacity amount=30 unit=token",
        "undone=not_needed tier=disk reason=already_stored amount=9 unit=block",
        "prefetch_hit=100 prefetch_fulfilled=60 prefetch_unfulfilled=30 prefetch_outstanding=10",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (999_600, "1.0 MB"), (5e15, "5,000.0 TB")],
)
def test_bytes(value: float, text: str) -> None:
    assert demo_view._bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1e-5, "10 us"), (5e-4, "500 us"), (0.002, "2 ms"), (1.0, "1 s"), (float("inf"), "above")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert demo_view._seconds(value) == text
