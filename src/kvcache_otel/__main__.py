"""``python -m kvcache_otel``: the command ``kvcache-otel``, where its script is not on the path."""

from __future__ import annotations

import sys

from kvcache_otel.cli import main

if __name__ == "__main__":
    sys.exit(main())
