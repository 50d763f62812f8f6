"""What standard output is."""

from __future__ import annotations

import os
import sys


def is_drawn() -> bool:
    """Returns whether it is a terminal in which something can be drawn anew."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
