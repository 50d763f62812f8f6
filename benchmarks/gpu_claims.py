"""What `gpu_timing` claims of its figures, and how both are shown. Nothing is measured here."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

APART = 0.05
"""How far a device time may be from what it is compared with, as a share of that."""

BLOCKED_US = 20.0
"""How long the engine's thread may be kept from its work by one transfer."""


class Alone(NamedTuple):
    """Copies of one direction, each alone on its stream. Times are seconds, copy by copy; NaN where there is no sample.

    Attributes:
        way: The direction.
        device: As the histogram has it.
        synchronised: From before the launch until the host has waited for the stream.
        launch: From before the launch to its return: what a clock on the host takes for the copy's time.
    """

    way: str
    device: Sequence[float]
    synchronised: Sequence[float]
    launch: Sequence[float]

    @property
    def apart(self) -> float:
        """How far the device time is from the synchronised one, by the median copy."""
        return _median([_apart(*pair) for pair in zip(self.device, self.synchronised, strict=True)])


class Busy(NamedTuple):
    """Copies of one direction, launched one behind the other while the device is at work.

    Attributes:
        way: The direction.
        blocked: Seconds that beginning and ending each transfer took the engine's thread.
    """

    way: str
    blocked: Sequence[float]


class Together(NamedTuple):
    """Copies on a stream beside another that copies too, beside events of the benchmark's own around the same copies.

    Attributes:
        way: The direction.
        device: Seconds as the histogram has them, copy by copy; NaN where there is no sample.
        own: Seconds between the benchmark's events.
    """

    way: str
    device: Sequence[float]
    own: Sequence[float]

    @property
    def apart(self) -> float:
        """How far the two are apart, by the worst copy."""
        return _worst([_apart(*pair) for pair in zip(self.device, self.own, strict=True)])


class Figures(NamedTuple):
    """All that was measured on one device.

    Attributes:
        device: What it is.
        bytes: The size of a copy.
        arrived: The directions in which the bytes were seen to arrive.
        alone: Copies alone, by direction.
        busy: Copies behind others, by direction.
        looks: How often it was looked for a sample while a device was still at the copy.
        early: How often there was one.
        together: Copies on two streams at the same time, by stream.
        rounds: How often two streams copied.
        overlapped: How often they were seen to do so at the same time.
        copies: Transfers that were begun and ended.
        samples: Samples of them.
    """

    device: str
    bytes: int
    arrived: Sequence[str]
    alone: Sequence[Alone]
    busy: Sequence[Busy]
    looks: int
    early: int
    together: Sequence[Together]
    rounds: int
    overlapped: int
    copies: int
    samples: int


class Claim(NamedTuple):
    """Something that must be so.

    Attributes:
        what: What.
        measured: What was measured.
        bound: What would have been enough.
        held: Whether it is so. What was not seen at all is not.
    """

    what: str
    measured: str
    bound: str
    held: bool


def claims(figures: Figures) -> Iterator[Claim]:
    """Judges the figures."""
    for alone in figures.alone:
        arrived = alone.way in figures.arrived
        yield Claim(f"{alone.way}: its bytes arrive", "yes" if arrived else "no", "yes", arrived)
        what = f"{alone.way}: device time beside a synchronised measurement"
        yield Claim(what, _percent(alone.apart), f"<= {_percent(APART)}", alone.apart <= APART)
    for busy in figures.busy:
        blocked = _median(busy.blocked) * 1e6
        measured = f"{blocked:.1f} us (p99 {_late(busy.blocked) * 1e6:.1f})"
        what = f"{busy.way}: the engine's thread is blocked, a transfer"
        yield Claim(what, measured, f"< {BLOCKED_US:g} us", blocked < BLOCKED_US)
    measured = f"{figures.early} of {figures.looks} looks"
    yield Claim("no sample before its event is done", measured, "0", figures.looks > 0 and figures.early == 0)
    for together in figures.together:
        what = f"{together.way}, beside another stream: worst copy beside events of its own"
        yield Claim(what, _percent(together.apart), f"<= {_percent(APART)}", together.apart <= APART)
    measured = f"{figures.overlapped} of {figures.rounds}"
    yield Claim("these streams copy at the same time", measured, "> half", figures.overlapped * 2 > figures.rounds)
    measured = f"{figures.samples} of {figures.copies}"
    every = figures.samples == figures.copies > 0
    yield Claim("every transfer has a sample, and no more", measured, "all", every)


def table(figures: Figures, judged: Sequence[Claim]) -> Iterator[str]:
    """Returns what to print, line by line."""
    yield figures.device
    yield f"{figures.bytes / 2**20:g} MiB a copy, to and from pinned host memory, each on a stream of its own"
    yield ""
    yield f"{'one copy alone, median':<24}{'device time':>14}{'synchronised':>14}{'launch, by the host':>21}{'GB/s':>8}"
    for alone in figures.alone:
        device, synchronised, launch = map(_median, (alone.device, alone.synchronised, alone.launch))
        rate = figures.bytes / device / 1e9 if device > 0 else math.nan
        yield f"{alone.way:<24}{_ms(device):>14}{_ms(synchronised):>14}{_ms(launch):>21}{rate:>8.1f}"
    yield ""
    width = max(len(claim.what) for claim in judged)
    yield f"{'claim':<{width}}{'measured':>24}{'enough':>10}"
    for claim in judged:
        yield f"{claim.what:<{width}}{claim.measured:>24}{claim.bound:>10}{'' if claim.held else '  missed'}"


def _apart(one: float, other: float) -> float:
    return abs(one / other - 1) if other > 0 else math.nan


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if _all_there(values) else math.nan


def _worst(values: Sequence[float]) -> float:
    return max(values) if _all_there(values) else math.nan


def _late(values: Sequence[float]) -> float:
    """Returns what 99 of 100 are below."""
    return sorted(values)[len(values) * 99 // 100] if _all_there(values) else math.nan


def _all_there(values: Sequence[float]) -> bool:
    return bool(values) and not any(map(math.isnan, values))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
