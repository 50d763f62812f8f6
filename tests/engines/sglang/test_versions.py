"""The hooks on every release of SGLang that is supported, older ones in processes of their own."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel.engines.sglang.table import HOOKS  # noqa: E402
from kvcache_otel.engines.versions import is_before  # noqa: E402
from tests.engines.sglang.processes import CORES, INSTALLED, OLDER, run_module  # noqa: E402

pytestmark = pytest.mark.engine

WALKS = ["write-through", "write-back, small host"]
"""The program's walks."""

BLOCKS = 8
"""What a refill brings back."""


@functools.cache
def facts(version: str) -> dict[str, Any]:
    """What the program found on a release: it runs once for all tests of it."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        found = run_module("version_program", folder, version=version).result()
    assert found["version"] == version, "the program has driven another release"
    assert tuple(found["cores"]) == CORES[version]
    assert all(list(core) == [*WALKS, "refill"] for core in found["cores"].values())
    return found


def found(version: str, core: str, what: str) -> dict[str, Any]:
    """One part of it."""
    part: dict[str, Any] = facts(version)["cores"][core][what]
    assert "failed" not in part, f"SGLang {version}, {core} core, {what}:\n{part['failed']}"
    return part


def releases(first: str, last: str) -> list[Any]:
    """The releases of a range, with each of their cores."""
    return [
        pytest.param(version, core, id=f"{version}-{core}")
        for version, cores in CORES.items()
        if not is_before(version, first) and not is_before(last, version)
        for core in cores
    ]


@pytest.mark.parametrize("version", [*OLDER, INSTALLED])
def test_every_hook_is_attached_that_the_table_says_is_there(version: str) -> None:
    missing = [name for name, state in facts(version)["hooks"].items() if state != "attached"]
    assert missing == [hook.name for hook in HOOKS if is_before(version, hook.since)]


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize(("version", "core"), releases("0.5.18", INSTALLED))
def test_every_number_equals_sglangs_on_a_walk(version: str, core: str, walk: str) -> None:
    """That is for the program to say, after every step. Here: that the walk came by what there is."""
    walked = found(version, core, walk)
    own = walked["own"]
    assert own["evicted_tokens"] > 0
    assert walked["served"] > 0
    assert own["load_back_tokens"]["kv"] > 0
    assert own["stored_tokens"] > 0
    assert own["prefetched_tokens"] >= walked["refilled"] > 0
    assert (own["dropped_tokens"].get("host_pressure", 0) > 0) == (walk == "write-back, small host")


@pytest.mark.parametrize(("version", "core"), releases("0.5.18", INSTALLED))
def test_what_is_dropped_has_a_row_where_sglang_counts_all_of_it(version: str, core: str) -> None:
    """Under write-through it counts what has no copy yet from 0.5.20 on, with the Rust core from 0.5.21 on."""
    counts = not is_before(version, "0.5.21" if core == "rust" else "0.5.20")
    reasons = {walk: found(version, core, walk)["drop reasons"] for walk in WALKS}
    assert reasons == {
        "write-through": ["host_pressure", "write_through_unbacked_eviction"] if counts else [],
        "write-back, small host": ["host_pressure"],
    }


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize(("version", "core"), releases("0.5.20", INSTALLED))
def test_what_is_published_is_what_is_held_after_every_step(version: str, core: str, walk: str) -> None:
    walked = found(version, core, walk)
    assert walked["apart"] == {"device": 0, "host": 0}
    assert walked["published"] == walked["held"]
    assert walked["unknown removes"] == 0


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize(("version", "core"), releases("0.5.18", "0.5.19"))
def test_before_0_5_20_the_events_say_less_of_the_host_than_it_holds(version: str, core: str, walk: str) -> None:
    """Of each block that a prefetch has brought, the first that a subscriber hears is its removal.

    That these are all of the difference is for the program to say, after every step.
    """
    walked = found(version, core, walk)
    assert walked["apart"]["device"] == 0
    assert walked["apart"]["host"] > 0
    assert walked["published"]["host"] <= walked["held"]["host"]
    assert 0 < walked["unknown removes"] <= walked["refilled"]


# -- the missing host event --------------------------------------------------------------------------------------------

EVENT = ["BlockStored", "CPU_PINNED", BLOCKS]
LOADED = ["BlockStored", "GPU", BLOCKS]


def _views(published: int, held: int) -> dict[str, int]:
    return {"published": published, "held": held}


@pytest.mark.parametrize(("version", "core"), releases("0.5.18", "0.5.19"))
def test_before_0_5_20_a_refill_of_the_host_is_held_and_not_published(version: str, core: str) -> None:
    """A router that believes the events takes the host for empty: of what it holds, nothing is published."""
    refill = found(version, core, "refill")
    assert refill["tokens"] == 4 * BLOCKS
    moments = refill["moments"]
    assert moments["stored"] == {"device": _views(BLOCKS, BLOCKS), "host": _views(BLOCKS, BLOCKS)}
    assert moments["evicted"] == {"device": _views(0, 0), "host": _views(0, 0)}
    assert moments["refilled"] == {"device": _views(BLOCKS, BLOCKS), "host": _views(0, BLOCKS)}
    assert refill["events"] == [LOADED]
    assert moments["evicted again"] == {"device": _views(0, 0), "host": _views(0, 0)}
    assert refill["unknown removes"] == BLOCKS, "what was not announced is removed all the same"


@pytest.mark.parametrize(("version", "core"), releases("0.5.20", INSTALLED))
def test_from_0_5_20_on_a_refill_of_the_host_is_published(version: str, core: str) -> None:
    refill = found(version, core, "refill")
    assert refill["tokens"] == 4 * BLOCKS
    moments = refill["moments"]
    assert moments["evicted"] == {"device": _views(0, 0), "host": _views(0, 0)}
    assert moments["refilled"] == {"device": _views(BLOCKS, BLOCKS), "host": _views(BLOCKS, BLOCKS)}
    assert refill["events"] == [EVENT, LOADED]
    assert moments["evicted again"] == {"device": _views(0, 0), "host": _views(0, 0)}
    assert refill["unknown removes"] == 0
