"""Four users talk with the engine for three turns; then what was measured of it is shown.

python -m examples.own_engine
"""

from __future__ import annotations

import random

from examples.own_engine.engine import Engine
from examples.own_engine.measured import measure
from examples.reading import Reading

USERS, TURNS = 4, 3
PREFIX_TOKENS, TURN_TOKENS = 64, 80


def converse(engine: Engine, users: int = USERS, turns: int = TURNS) -> int:
    """Has users take turns: each prompt is what all have in common and the conversation so far.

    Args:
        engine: The engine.
        users: How many conversations there are.
        turns: How long each of them gets.

    Returns:
        How many tokens the prompts had.
    """
    rng = random.Random(1)
    said = [list(range(PREFIX_TOKENS)) for _ in range(users)]
    tokens = 0
    for _ in range(turns):
        for conversation in said:
            conversation += [rng.randrange(50_000) for _ in range(TURN_TOKENS)]
            engine.generate(conversation)
            tokens += len(conversation)
    return tokens


def main() -> None:
    """See the module."""
    reading = Reading()
    engine = Engine(device_blocks=24, host_blocks=48)
    handle = measure(engine, reading.provider)
    print(handle.report())
    tokens = converse(engine)
    reading.settle()
    print(f"\nPrompts of {tokens:,} tokens. Who served them?")
    print(reading.table("kvcache.lookup.tokens"))
    print("\nWhat moved between the tiers, and for how long?")
    print(reading.table("kvcache.transfer.tokens", "kvcache.transfer.io", "kvcache.transfer.duration"))
    print("\nWhat had to go, and what is there?")
    print(
        reading.table("kvcache.eviction.tokens", "kvcache.dropped.tokens", "kvcache.usage", "kvcache.resident.blocks")
    )
    handle.remove()
    reading.close()


if __name__ == "__main__":
    main()
