"""Copies and pickles of SGLang's objects are as they are without us, and carry nothing of ours."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.sglang.cache import ROWS  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines.sglang.conftest import Instrumented

pytestmark = pytest.mark.engine

PARTS: dict[str, Callable[[CacheDriver], Any]] = {
    "cache": lambda driver: driver.cache,
    "tree core": lambda driver: driver.cache.tree_core,
    "controller": lambda driver: driver.cache.cache_controller,
    "transfer engine": lambda driver: driver.cache.cache_controller.l2_transfer_engine,
}
"""What carries our rows."""

WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda part: pickle.loads(pickle.dumps(part)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", PARTS)
def test_a_copy_is_what_it_is_without_us(
    make: Callable[..., CacheDriver], core: str, part: str, way: str, tmp_path: Path
) -> None:
    found = PARTS[part](make(core=core, storage_dir=tmp_path))
    rows = getattr(found, ROWS)
    with_us = _outcome(WAYS[way], found)
    assert getattr(found, ROWS) is rows, "the original keeps its rows"
    delattr(found, ROWS)
    without_us = _outcome(WAYS[way], found)
    setattr(found, ROWS, rows)
    assert with_us == without_us
    if part == "transfer engine":
        assert with_us == "a copy", "one at least can be copied, or this shows nothing"


@pytest.mark.parametrize("way", WAYS)
def test_what_a_copy_does_is_not_counted(
    make: Callable[..., CacheDriver], instrumented: Instrumented, way: str
) -> None:
    driver = make()
    driver.insert(range(4 * PAGE))
    driver.settle()
    copied = WAYS[way](driver.cache.cache_controller.l2_transfer_engine)
    copied.submit_device_to_host([])
    copied.submit_host_to_device([], transfer_layer_id_max=0)
    for _, value in instrumented.rows.values(semconv.TRANSFER_ACTIVE).items():
        assert value == 0
    instrumented.assert_sound()


def _outcome(way: Callable[[Any], Any], part: Any) -> str:
    """What comes of it: a copy that carries nothing of ours, or why there is none."""
    try:
        made = way(part)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert getattr(made, ROWS, None) is None
    return "a copy"
