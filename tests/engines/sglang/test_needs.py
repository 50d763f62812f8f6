"""Without any one hook, and where any one misses something: gauges are right, or there is no row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.hooks import Hook, HookSet  # noqa: E402
from kvcache_otel.engines.sglang import needs  # noqa: E402
from kvcache_otel.engines.sglang.table import HOOKS  # noqa: E402
from tests.engines.sglang.cache_driver import CacheDriver  # noqa: E402
from tests.engines.sglang.conftest import Instrumented  # noqa: E402
from tests.engines.sglang.expected import BACKUP, LOAD_BACK, NAME, READ, STORAGE, WRITE  # noqa: E402
from tests.engines.sglang.oracle import pools, recount, unsettled  # noqa: E402
from tests.engines.sglang.walk import random_walk  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.rows import Rows

pytestmark = pytest.mark.engine

ESSENTIAL = {"cache.init", "cache.init_hicache"}
"""Without these there are no rows."""

OPERATIONS = 120
NAMES = [hook.name for hook in HOOKS if hook.name not in ESSENTIAL]


def _truth(driver: CacheDriver) -> dict[tuple[str, ...], int]:
    """What every gauge must say that says anything."""
    counted, slots, controller = recount(driver), pools(driver), driver.cache.cache_controller
    (host,) = slots.host.values()
    return {
        ("held", "device"): counted.device_blocks,
        ("held", "host"): counted.host_blocks,
        ("published", "device"): counted.device_blocks,
        ("published", "host"): counted.host_blocks,
        ("used", "device"): slots.device_total - slots.device_free - slots.device_evictable,
        ("evictable", "device"): slots.device_evictable,
        ("free", "device"): slots.device_free,
        ("used", "host"): host.used,
        ("active", "backup"): len(controller.ack_write_queue),
        ("active", "load_back"): len(controller.ack_load_queue),
        ("outstanding",): unsettled(driver),
        # Threads of SGLang's are at it while the walk goes on; in the end there is none.
        ("active", "read"): 0,
        ("active", "write"): 0,
    }


def _said(rows: Rows) -> dict[tuple[str, ...], int | float]:
    """What the gauges say that have a row."""
    found: dict[tuple[str, ...], int | float | None] = {}
    for tier in ("device", "host"):
        for view in ("held", "published"):
            found[view, tier] = rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view=view)
        for state in ("used", "evictable", "free"):
            found[state, tier] = rows.value(semconv.USAGE, tier=tier, pool="kv", state=state)
    del found["free", "host"]
    for name, route in (
        ("backup", BACKUP),
        ("load_back", LOAD_BACK),
        ("read", {**READ, **NAME}),
        ("write", {**WRITE, **NAME}),
    ):
        found["active", name] = rows.value(semconv.TRANSFER_ACTIVE, **route)
    found["outstanding",] = rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE)
    return {what: value for what, value in found.items() if value is not None}


def _right_or_absent(instrumented: Instrumented, driver: CacheDriver, hook: str) -> set[tuple[str, ...]]:
    """Walks, and returns which gauges had no row at the end."""
    for operation in random_walk(driver, 7, OPERATIONS):
        truth, said = _truth(driver), _said(instrumented.rows)
        busy = {("active", "read"), ("active", "write")}
        wrong = {what: (said[what], truth[what]) for what in said.keys() - busy if said[what] != truth[what]}
        assert not wrong, f"after {operation}, without {hook}"
    truth, said = _truth(driver), _said(instrumented.rows)
    assert said == {what: truth[what] for what in said}, f"in the end, without {hook}"
    return truth.keys() - said.keys()


def _ended_without(hook: str, core: str) -> set[tuple[str, ...]]:
    """Which gauges have no row where a hook cannot be relied upon."""
    ended: set[tuple[str, ...]] = set()
    if hook in needs.resident_host(core):
        ended.add(("held", "host"))
    if hook in needs.BACKUP:
        ended.add(("active", "backup"))
    if hook in needs.LOAD_BACK:
        ended.add(("active", "load_back"))
    if hook in needs.READ:
        ended.add(("active", "read"))
    if hook in needs.WRITE:
        ended.add(("active", "write"))
    if hook in needs.OUTSTANDING:
        ended.add(("outstanding",))
    if hook == needs.settling(hicache=True):
        ended.update({("held", "device"), ("held", "host"), ("used", "host")})
        ended.update((state, "device") for state in ("used", "evictable", "free"))
    if hook in needs.PUBLISHED:
        ended.update({("published", "device"), ("published", "host")})
    return ended


@pytest.fixture
def instrumented() -> Iterator[Instrumented]:
    made = Instrumented()
    yield made
    made.hooks.detach()


def _driver(core: str, directory: Path) -> CacheDriver:
    return CacheDriver(core=core, storage_dir=directory)


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_that_is_not_there(instrumented: Instrumented, name: str, core: str, tmp_path: Path) -> None:
    hooks = [_gone(hook) if hook.name == name else hook for hook in HOOKS]
    adapter = instrumented.adapter
    instrumented.hooks = HookSet(hooks, lambda body: getattr(adapter, body), changed=adapter.hook_failed)
    instrumented.hooks.attach()
    with _driver(core, tmp_path) as driver:
        assert _right_or_absent(instrumented, driver, name) == _ended_without(name, core)


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_that_fails_once(
    instrumented: Instrumented, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = instrumented.adapter
    body = next(hook.body for hook in HOOKS if hook.name == name)
    calls = iter(range(10**9))

    def fallible(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise ValueError("ours")
        return original(*args, **kwargs)

    original = getattr(adapter, body)
    instrumented.hooks = HookSet(
        HOOKS,
        lambda asked: fallible if asked == body else getattr(adapter, asked),
        changed=adapter.hook_failed,
    )
    instrumented.hooks.attach()
    with _driver("python", tmp_path) as driver:
        _right_or_absent(instrumented, driver, name)


def _gone(hook: Hook) -> Hook:
    return Hook(
        name=hook.name, target=f"{hook.target}_of_another_release", body=hook.body, fact=hook.fact, moment=hook.moment
    )
