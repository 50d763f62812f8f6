"""The catalogue: what it says, what it must keep to, and what is derived from it."""

MODEL = "model/kvcache.yaml"
"""Where it is written down, from the root of the checkout."""

COMMAND = "python tools/generate.py"
"""What brings everything derived from it up to date."""
