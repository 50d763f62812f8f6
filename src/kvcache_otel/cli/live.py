"""A live display in a terminal to which others write too. It needs rich, which is imported when it is wanted."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextmanager
def live(draw: Callable[[], Any]) -> Generator[Callable[[], None]]:
    """Shows something until the end of the block, and leaves there what was shown last.

    Args:
        draw: Returns what there is to show now, as rich can draw it.

    Yields:
        What has it drawn anew.
    """
    from rich.console import Console
    from rich.live import Live

    shared = sys.stderr.isatty()
    with Live(draw(), console=Console(), auto_refresh=False, redirect_stderr=shared) as display, _above():
        yield lambda: display.update(draw(), refresh=True)


@contextmanager
def _above() -> Generator[None]:
    """Lets what is logged appear above the display, where both are on one terminal, and not within it."""
    handlers: list[Any] = list(logging.getLogger().handlers)
    moved = [handler for handler in handlers if getattr(handler, "stream", None) is sys.__stderr__]
    for handler in moved:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(sys.__stderr__)
