"""The command ``kvcache-otel``."""

from __future__ import annotations


def main() -> int:
    """Runs the command; returns its exit status."""
    from kvcache_otel.cli import foreign_code
    from kvcache_otel.cli.command import run

    status = run()
    foreign_code.leave(status)
    return status
