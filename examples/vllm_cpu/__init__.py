"""A real vLLM engine with a three-tier KV cache (device, host, disk), on a machine without a GPU."""
