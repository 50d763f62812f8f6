"""Without any one hook, and where any one misses something: gauges are right, or there is no row."""

from __future__ import annotations

import importlib
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("vllm")

from examples.vllm_cpu.cpu_offload_spec import CpuTieringSpec  # noqa: E402
from vllm.distributed.kv_events import ZmqEventPublisher  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.hooks import Hook  # noqa: E402
from kvcache_otel.engines.vllm import needs  # noqa: E402
from kvcache_otel.engines.vllm.table import HOOKS  # noqa: E402
from tests.engines.vllm.conftest import Instrumented  # noqa: E402
from tests.engines.vllm.device_driver import BLOCKS, TOKENS, Device, device_walk, publishing  # noqa: E402
from tests.engines.vllm.manager_driver import Worker, making_drivers, random_walk  # noqa: E402
from tests.engines.vllm.oracle import CASCADE, DISK, PROMOTION  # noqa: E402
from tests.engines.vllm.recounts import device_blocks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.vllm.manager_driver import ManagerDriver

pytestmark = pytest.mark.engine

ESSENTIAL = {"scheduler.init", "tiering.get_manager", "tiering.create_worker"}
"""Without these there are no rows."""

NAMES = [hook.name for hook in HOOKS if hook.name not in ESSENTIAL]
BOOKED = sorted(needs.COPIES.hooks | needs.PUBLISHED.hooks)
CAPACITY = 8
STORE, LOAD = {"source": "device", "destination": "host"}, {"source": "host", "destination": "device"}

Gauges = dict[tuple[str, ...], int | float]

ENDED: dict[needs.Need, set[tuple[str, ...]]] = {
    needs.DEVICE: {("held", "device"), ("used", "device"), ("free", "device")},
    needs.HOST: {("held", "host"), ("used", "host"), ("evictable", "host"), ("free", "host")},
    needs.SECONDARY: {(what, way) for what in ("active", "pinned") for way in ("promotion", "cascade")},
    needs.COPIES: {("active", "store"), ("active", "load")},
    needs.PUBLISHED: {("published", "device"), ("published", "host")},
}


class Cache:
    """A device, a host tier, a disk and a worker between the first two."""

    def __init__(self, instrumented: Instrumented, driver: ManagerDriver, device: Device) -> None:
        self.driver, self.device, self._rows = driver, device, instrumented.rows
        self.worker = Worker(driver)
        self.active = {"store": 0, "load": 0}

    def truth(self) -> Gauges:
        """What every gauge must say that says anything."""
        device, host = device_blocks(self.device.pool), self.driver.recount()
        free = self.device.pool.get_num_free_blocks()
        return {
            ("held", "device"): device,
            ("published", "device"): device,
            ("used", "device"): (BLOCKS - 1 - free) * TOKENS,
            ("free", "device"): free * TOKENS,
            ("held", "host"): host.evictable + host.referenced,
            ("published", "host"): host.evictable + host.referenced,
            ("used", "host"): host.used * TOKENS,
            ("evictable", "host"): host.evictable * TOKENS,
            ("free", "host"): host.free * TOKENS,
            ("active", "promotion"): host.jobs[DISK, True],
            ("active", "cascade"): host.jobs[DISK, False],
            ("pinned", "promotion"): host.job_blocks[DISK, True],
            ("pinned", "cascade"): host.job_blocks[DISK, False],
            ("active", "store"): self.active["store"],
            ("active", "load"): self.active["load"],
        }

    def said(self) -> Gauges:
        """What the gauges say that have a row."""
        value = self._rows.value
        found: dict[tuple[str, ...], int | float | None] = {}
        for tier in ("device", "host"):
            for view in ("held", "published"):
                found[view, tier] = value(semconv.RESIDENT_BLOCKS, tier=tier, view=view)
            for state in ("used", "evictable", "free"):
                found[state, tier] = value(semconv.USAGE, tier=tier, pool="kv", state=state)
        for name, route in (("promotion", PROMOTION), ("cascade", CASCADE), ("store", STORE), ("load", LOAD)):
            found["active", name] = value(semconv.TRANSFER_ACTIVE, **route)
        for name, route in (("promotion", PROMOTION), ("cascade", CASCADE)):
            found["pinned", name] = value(semconv.TRANSFER_ACTIVE_BLOCKS, **route)
        return {what: number for what, number in found.items() if number is not None}

    def check(self) -> None:
        """At the end of a step every gauge that says something is right."""
        self.device.step()
        truth, said = self.truth(), self.said()
        assert {what: (number, truth[what]) for what, number in said.items() if number != truth[what]} == {}

    def live(self) -> set[tuple[str, ...]]:
        """Does a bit of everything; returns which gauges had no row at the end."""
        self._copy()
        random_walk(self.driver, random.Random(3), 80, self.check, without={"reset"})
        for seed in range(4):
            device_walk(self.device, random.Random(seed), groups=1, partial=False, steps=30, check=self.check)
        self._copy()
        self.worker.close()
        self.check()
        return self.truth().keys() - self.said().keys()

    def _copy(self) -> None:
        request = self.driver.request()
        for job in range(4):
            pending = self.driver.begin_store(request, [100 + job])
            assert pending is not None
            self.worker.submit_store(job, [job], pending.output.store_spec)
            self.active["store"] += 1
            self._drained()
            self.worker.wait([job])
            self.worker.get_finished()
            self.active["store"] -= 1
            self.driver.complete_store(pending)
            self._drained()
        self.driver.finish(request)
        self.driver.settle()

    def _drained(self) -> None:
        self.driver.drain()
        self.check()


@pytest.fixture
def instrumented() -> Iterator[Instrumented]:
    for hook in HOOKS:
        importlib.import_module(hook.module)
    made = Instrumented()
    yield made
    made.hooks.detach()


@pytest.fixture
def live(instrumented: Instrumented, tmp_path: Path) -> Iterator[Callable[[], set[tuple[str, ...]]]]:
    """Lets a cache live with the hooks that there are; returns which gauges had no row at the end."""
    publishers: list[ZmqEventPublisher] = []

    def live() -> set[tuple[str, ...]]:
        instrumented.hooks.attach()
        with making_drivers(tmp_path / "blocks", CAPACITY) as drivers:
            driver = drivers(spec_class=CpuTieringSpec)
            publishers.append(ZmqEventPublisher(0, f"inproc://kvcache-otel-needs-{time.monotonic_ns()}"))
            return Cache(instrumented, driver, Device(instrumented, publishers[0], None, publishing(driver))).live()

    yield live
    for publisher in publishers:
        publisher.shutdown()


def test_with_every_hook_every_gauge_is_right(live: Callable[[], set[tuple[str, ...]]]) -> None:
    assert live() == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_that_is_not_there(
    live: Callable[[], set[tuple[str, ...]]],
    instrumented: Instrumented,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    adapter = instrumented.adapter
    instrumented.hook(
        tuple(_gone(hook) if hook.name == name else hook for hook in HOOKS), lambda body: getattr(adapter, body)
    )
    (needed,) = [need for need in ENDED if name in need.hooks] or [None]
    assert live() == (ENDED[needed] if needed is not None else set())
    said = [record.getMessage() for record in caplog.records if record.name == needs.__name__]
    assert len(said) == (0 if needed is None else 2 if needed is needs.COPIES else 1)


@pytest.mark.parametrize("name", BOOKED)
def test_a_hook_that_fails_once(
    live: Callable[[], set[tuple[str, ...]]], instrumented: Instrumented, name: str
) -> None:
    adapter = instrumented.adapter
    body = next(hook.body for hook in HOOKS if hook.name == name)
    original, calls = getattr(adapter, body), iter(range(10**9))

    def fallible(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == (0 if name == "worker.shutdown" else 2):
            raise ValueError("ours")
        return original(*args, **kwargs)

    instrumented.hook(HOOKS, lambda asked: fallible if asked == body else getattr(adapter, asked))
    (needed,) = (need for need in ENDED if name in need.hooks)
    assert live() == ENDED[needed]
    assert {point.hook.name for point in instrumented.hooks.points if point.errors} == {name}


def _gone(hook: Hook) -> Hook:
    return Hook(
        name=hook.name, target=f"{hook.target}_of_another_release", body=hook.body, fact=hook.fact, moment=hook.moment
    )
