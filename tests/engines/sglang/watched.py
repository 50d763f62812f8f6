"""What a walk does that no counter of SGLang's tells, and what must come out even because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from tests.engines.sglang.cache_driver import PAGE, RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engines.sglang.cache_driver import CacheDriver, Prefetched, Retracted
    from tests.support.rows import Rows


class Watched:
    """A driver whose methods are watched.

    Attributes:
        refilled: Blocks that prefetches have put into the tree's host part.
        forgotten: Blocks that were held and not published when the cache was reset.
        retracted: Tokens of retracted requests that were copied to the host and back.
    """

    def __init__(self, driver: CacheDriver, rows: Callable[[], Rows]) -> None:
        """Args:
        driver: The driver, of whose cache nothing has been asked yet.
        rows: Gives what we have recorded of it.
        """
        self.refilled = self.forgotten = 0
        self.retracted = (0, 0)
        self._rows = rows
        _then(driver, "end_prefetch", self._prefetched)
        _then(driver, "retract_backup", lambda retracted, *_: self._copied(retracted, 0))
        _then(driver, "retract_restore", lambda _, retracted: self._copied(retracted, 1))
        reset = driver.reset

        def forgetting() -> None:
            self.forgotten += self._unpublished
            reset()

        driver.reset = forgetting  # type: ignore[method-assign]

    @property
    def unknown_removes(self) -> int:
        """Removals of blocks that were in no event before, as we have counted them."""
        return int(self._rows().total(semconv.ACCOUNTING_ERRORS, reason="unknown_remove"))

    @property
    def _unpublished(self) -> int:
        rows = self._rows()
        return int(held(rows, "host") - published(rows, "host"))

    def assert_adds_up(self) -> None:
        """Before 0.5.20, what prefetches bring is not announced: it is still held, removed as unknown, or reset.

        Nothing else is, and from 0.5.20 on nothing at all.
        """
        silent = self._unpublished + self.unknown_removes + self.forgotten
        assert silent == (0 if RELEASE >= (0, 5, 20) else self.refilled)

    def _prefetched(self, prefetched: Prefetched, *_: Any) -> None:
        self.refilled += prefetched.tokens // PAGE

    def _copied(self, retracted: Retracted | None, way: int) -> None:
        if retracted is not None:
            tokens = list(self.retracted)
            tokens[way] += -(-len(retracted.tokens) // PAGE) * PAGE
            self.retracted = (tokens[0], tokens[1])


def _then(driver: CacheDriver, name: str, tell: Callable[..., None]) -> None:
    """Has a driver's method tell its result, followed by its arguments."""
    method = getattr(driver, name)

    def told(*arguments: Any) -> Any:
        result = method(*arguments)
        tell(result, *arguments)
        return result

    setattr(driver, name, told)


def published(rows: Rows, tier: str) -> float:
    """Blocks that the events say are in a tier."""
    value = rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view="published")
    assert value is not None
    return value


def held(rows: Rows, tier: str) -> float:
    """Blocks that a tier holds."""
    value = rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view="held")
    assert value is not None
    return value
