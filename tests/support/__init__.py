"""Real programs that tests talk to, as context managers. They end only what they started."""
