"""What a cache holds, what it publishes, and what three subscribers believe: one beside it, two behind a lossy link.

python -m examples.router_view [--rounds 5] [--one-of 8]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from examples.reading import Reading
from examples.router_view.watching import Watching
from kvcache_otel.demo.cache import TieredCache
from kvcache_otel.demo.config import Config
from kvcache_otel.demo.instrument import instrument
from kvcache_otel.demo.publisher import Publisher
from kvcache_otel.demo.workload import Shape, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

ANY_PORT = "tcp://127.0.0.1:*"

TIERS = ("device", "host", "disk")

STEPS = 60
"""Of the workload, in a round."""

ROUND_SECONDS = 1.0
"""For subscribers to take in what was published in a round, where what was lost lets them."""

SETTLE_SECONDS = 30.0
"""For the last replay to come."""


class Row(NamedTuple):
    """One view of the tiers.

    Attributes:
        view: Whose it is.
        blocks: By tier.
        lost: Batches that it knows to have missed for good; None where it cannot miss any.
        recovered: Batches that a replay has brought; None where it cannot miss any.
    """

    view: str
    blocks: dict[str, int]
    lost: int | None = None
    recovered: int | None = None


def rows(reading: Reading, watching: Watching) -> list[Row]:
    """Returns all views, as they are now."""
    resident = reading.values("kvcache.resident.blocks")
    own = [Row(view, {tier: int(resident[f"{tier} {view}"]) for tier in TIERS}) for view in ("held", "published")]
    return own + [
        Row(
            worker,
            {tier: watching.number(worker, tier) for tier in TIERS},
            watching.number(worker, "lost"),
            watching.number(worker, "recovered"),
        )
        for worker in ("direct", "lossy", "mended")
    ]


def table(found: list[Row]) -> str:
    """Returns the views as a table."""
    lines = [f"{'':<22}{'device':>8}{'host':>8}{'disk':>8}{'lost':>8}{'recovered':>11}"]
    for row in found:
        name = row.view if row.lost is None else f"received: {row.view}"
        counts = "".join(f"{row.blocks[tier]:>8}" for tier in TIERS)
        batches = "" if row.lost is None else f"{row.lost:>8}{row.recovered:>11}"
        lines.append(f"{name:<22}{counts}{batches}")
    return "\n".join(lines)


def settled(found: list[Row], lost: int) -> bool:
    """Returns whether every subscriber has heard of all that there was, and knows what it missed."""
    _, published, direct, lossy, mended = found
    return direct.blocks == mended.blocks == published.blocks and lossy.lost == mended.recovered == lost


def run(rounds: int, one_of: int, show: Callable[[str], None] = print) -> tuple[list[Row], int]:
    """Has a cache publish, and subscribers listen.

    Args:
        rounds: How many lots of steps the cache takes.
        one_of: Of so many batches in a row, the link loses one.
        show: Is given what there is to see.

    Returns:
        The views in the end, and how many batches the link has lost.

    Raises:
        ImportError: msgspec or pyzmq is not installed.
        TimeoutError: The subscribers have not come, or do not settle.
    """
    from examples.router_view.link import LossyLink  # It cannot be imported without pyzmq.

    publisher = Publisher(ANY_PORT, ANY_PORT)
    reading = Reading()
    cache = TieredCache(Config(device_tokens=3072, host_tokens=6144, disk_tokens=16384))
    cache.sinks.append(publisher)
    instrument(cache, reading.provider)
    workload = Workload(cache, Shape(users=24, prefix=256))
    link = LossyLink(publisher.endpoint, one_of)
    replay = f"?replay={publisher.replay_endpoint}"
    sources = (f"direct={publisher.endpoint}{replay}", f"lossy={link.endpoint}", f"mended={link.endpoint}{replay}")
    try:
        with Watching(*sources) as watching:
            _until(lambda: link.subscribers == 2, "the subscribers have not come")
            for number in range(1, rounds + 1):
                link.loses = number < rounds  # That one was lost is seen when another comes.
                _steps(workload, STEPS)
                time.sleep(ROUND_SECONDS)
                show(f"\nround {number}, the link has lost {link.lost} batches\n{table(rows(reading, watching))}")
            _until(lambda: settled(rows(reading, watching), link.lost), "the subscribers do not settle")
            found = rows(reading, watching)
            show(f"\nat rest, the link has lost {link.lost} batches\n{table(found)}")
            return found, link.lost
    finally:
        link.close()
        publisher.close()
        cache.close()
        reading.close()


def _steps(workload: Workload, count: int) -> None:
    for _ in range(count):
        workload.step()
        time.sleep(0.002)  # Nobody is that fast, and the storage thread needs a moment.


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.1)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="What a cache publishes, and what arrives.")
    parser.add_argument("--rounds", type=_number, default=5, help="lots of steps (default: %(default)s)")
    parser.add_argument(
        "--one-of", type=_number, default=8, help="one of so many batches is lost (default: %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        run(arguments.rounds, arguments.one_of)
    except ImportError as error:
        sys.exit(f"examples.router_view: {error}: pip install '.[demo]'")
    except KeyboardInterrupt:
        sys.exit(130)  # As a shell has it.


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 2 to 1000")
    return int(text)


if __name__ == "__main__":
    main()
