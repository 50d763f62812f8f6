"""What a fact is written into: cells, the tables that hold them, and the probe that adapters speak to."""
