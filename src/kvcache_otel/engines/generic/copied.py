"""Copies and pickles of an object that is instrumented: they are not, and carry nothing of ours."""

from __future__ import annotations

from typing import Any, cast

# The attribute under which an object carries its instrumentation, which ends with it.
ANCHOR = "_kvcache_otel"


def reduce_plainly(owner: Any, protocol: Any) -> Any:
    """Takes the place of an object's `__reduce_ex__`: what copies and pickles it finds none of ours."""
    kind: Any = type(owner)  # pyright: ignore[reportUnknownVariableType]
    reduced: Any = kind.__reduce_ex__(owner, protocol)
    parts = cast("tuple[Any, ...]", reduced) if isinstance(reduced, tuple) else ()
    if len(parts) < 2:
        return cast("object", reduced)
    function, arguments, *rest = parts
    if isinstance(arguments, tuple):  # Some hand their attributes to a function of their own.
        arguments = tuple(map(_without_ours, cast("tuple[Any, ...]", arguments)))
    if not rest:
        return function, arguments
    state = rest[0]
    if isinstance(state, tuple) and len(slots := cast("tuple[Any, ...]", state)) == 2:  # With slots, they come second.
        state = _as_it_was(kind, slots[0]), slots[1]
    return function, arguments, _as_it_was(kind, state), *rest[1:]


def _as_it_was(kind: Any, state: Any) -> Any:
    """Returns what an object's state would be without ours: none, as Python has it, where there is nothing else."""
    left = _without_ours(state)
    return None if left is not state and not left and kind.__getstate__ is object.__getstate__ else left


def _without_ours(state: Any) -> Any:
    if not isinstance(state, dict) or ANCHOR not in state:
        return cast("object", state)
    attributes = cast("dict[str, Any]", state)
    return {name: value for name, value in attributes.items() if name != ANCHOR}
