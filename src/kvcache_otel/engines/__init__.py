"""One package per engine: which functions are hooked, and how a fact is read there."""
