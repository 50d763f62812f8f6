"""vLLM: offloading to a host tier and tiering below it, and the device's own prefix cache."""

from __future__ import annotations
