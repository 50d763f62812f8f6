"""What is missing where a library of an extra cannot be imported."""

from __future__ import annotations


def how(extra: str) -> str:
    """Returns how to install an extra of this project, as a line says it."""
    return f"install the extra {extra!r}: pip install 'kvcache-otel[{extra}]', in a checkout of it '.[{extra}]'"
