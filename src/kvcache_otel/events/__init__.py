"""What engines publish about their blocks, for routers that look for a prefix, and what it adds up to."""
