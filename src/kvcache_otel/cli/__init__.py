"""The command ``kvcache-otel``."""

from __future__ import annotations

import os

INTERRUPTED = 130
"""The exit status of a command that was interrupted, as shells have it."""


def main() -> int:
    """Runs the command; returns its exit status."""
    try:
        import signal
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)

    # Before and after the command itself there is nothing to tidy up, and nobody who would catch an exception.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # It is ignored in the background of a script.
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from kvcache_otel.cli import command, foreign_code

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = command.run()
        foreign_code.leave(status)
        return status
    finally:
        if ours:
            signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)
