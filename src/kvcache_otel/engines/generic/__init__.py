"""A cache of one's own: facts about its methods, and what wraps them on one object. See `docs/your-own-engine.md`."""
