"""Stores blocks in a real tiering manager, lets them go on to disk, and tells what vLLM counted.

    python -m tests.engines.vllm.driver_program FOLDER [--register]

Prints one line of JSON. ``--register`` calls the plugin's entry point first, as vLLM does; without it, whoever started
the program sees to that.
"""

from __future__ import annotations

import argparse
import json
import time


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--register", action="store_true")
    arguments = parser.parse_args()
    if arguments.register:
        from kvcache_otel.plugin import register_vllm

        register_vllm()
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    configure_logging(LoggingConfig())  # As an engine does, after it has loaded its plugins.

    from tests.engines.vllm.manager_driver import ManagerDriver, fs_tier, make_config

    began = time.monotonic()
    with ManagerDriver(make_config(8, [fs_tier(arguments.folder)])) as driver:
        request = driver.request()
        driver.store(request, range(4))
        driver.settle()
        driver.finish(request)
        driver.step()
        written = driver.totals.counter("tiering_write_bytes", "1:fs")
    print(json.dumps({"written": written, "seconds": time.monotonic() - began, "done": time.time()}), flush=True)


if __name__ == "__main__":
    main()
