"""``kvcache-otel demo``: a cache of three tiers under a made-up workload, measured like anybody's own, and shown.

The cache is real as far as it goes: bytes move and are checked. Only what they would be for is made up.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvcache_otel.cli.demo_options import LINES_SECONDS, LIVE_SECONDS, add_options, given, in_options
from kvcache_otel.cli.ending import Stop
from kvcache_otel.cli.extras import how
from kvcache_otel.demo.config import Config
from kvcache_otel.demo.workload import Shape
from kvcache_otel.export.settings import PROMETHEUS, Settings, one_line, scrape_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from kvcache_otel.cli.command import Commands
    from kvcache_otel.demo.cache import TieredCache
    from kvcache_otel.demo.workload import Workload
    from kvcache_otel.runtime import Runtime

_logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.1
"""How long it may take until it is seen that the process is to end."""


def add_to(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="run a small cache of three tiers under a workload, and show what is measured of it",
        description="Runs a small cache of three tiers (device, host, disk) under a workload of conversations, "
        "measured as any cache of one's own, and shows the rows that are exported. It needs no engine and no GPU.",
        epilog="Metrics are served for Prometheus; the standard OTEL_* variables say what else: "
        "OTEL_EXPORTER_OTLP_ENDPOINT pushes them besides, OTEL_METRICS_EXPORTER says what is done instead.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status: 0 if it ran until it was to end, 2 if it could not begin.

    Raises:
        BrokenPipeError: Nobody reads its output any more.
        OutputError: Its output cannot be written for another reason.
    """
    logging.basicConfig(format="kvcache-otel demo: %(message)s", level=logging.WARNING)
    os.environ.update(_variables(os.environ, options.port))
    settings = Settings.from_environ(os.environ)
    if settings.forbidden:
        return _cannot(settings.reason)
    if settings.config_file and options.port is not None:
        _logger.warning("--port does nothing: OTEL_CONFIG_FILE says what is exported")
    from kvcache_otel.demo.cache import TieredCache
    from kvcache_otel.demo.workload import Workload

    with ExitStack() as after:
        try:
            cache = TieredCache(given(Config, options))
            after.callback(cache.close)
            workload = Workload(cache, given(Shape, options))
            where = _publish(cache, options, after)
        except ImportError as error:
            return _cannot(f"--memory {options.memory}: {error}")
        except (ValueError, OSError, MemoryError) as error:
            return _cannot(in_options(str(error) or type(error).__name__))
        return _run(options, workload, where, after)


def _run(options: argparse.Namespace, workload: Workload, where: str, after: ExitStack) -> int:
    from kvcache_otel.cli.demo_rows import read
    from kvcache_otel.cli.demo_view import is_live, view
    from kvcache_otel.demo.instrument import instrument
    from kvcache_otel.instrumentation import instrumentation

    stop = Stop()
    after.callback(instrumentation.detach)
    instrument(workload.cache)
    runtime = instrumentation.runtime
    recorder = runtime.recorder if runtime is not None else None
    if runtime is None or recorder is None:
        return _cannot("nothing can be measured in this process")
    exported = _exported(runtime)
    for line in filter(None, (*exported, where)):
        print(f"kvcache-otel demo: {line}", file=sys.stderr)
    began = time.monotonic()

    def title() -> str:
        ran = f"{time.monotonic() - began:.0f} s, {workload.turns:,} answers"
        return f"kvcache-otel demo: {ran}; {exported[0]}"

    with view(lambda: read(recorder), title) as show:
        every = options.every or (LIVE_SECONDS if is_live() else LINES_SECONDS)
        _drive(workload, options.rate, options.seconds, every, stop, lambda: show(last=False))
        show(last=True)
    return 0


def _drive(
    workload: Workload, rate: float, lasting: float | None, every: float, stop: Stop, show: Callable[[], None]
) -> None:
    """Has the workload take its steps, and shows what there is between them, until it is to end."""
    now = time.monotonic()
    end = float("inf") if lasting is None else now + lasting
    pause = 1 / rate if rate else 0.0
    next_step, next_view = now, now + every
    while not stop.asked and (now := time.monotonic()) < end:
        if now >= next_view:
            show()
            next_view = time.monotonic() + every
        elif now >= next_step:
            workload.step()
            next_step = max(next_step, now - ROUND_SECONDS) + pause  # What was missed for longer is not caught up with.
        else:
            time.sleep(min(next_step, next_view, end, now + ROUND_SECONDS) - now)


# -- what is exported --------------------------------------------------------------------------------------------------


def _variables(environ: Mapping[str, str], port: int | None) -> dict[str, str]:
    """Returns the variables that make Prometheus be served, unless others say what is to be exported."""
    asked = Settings.from_environ(environ)
    if asked.config_file:
        return {}
    named = environ.get("OTEL_METRICS_EXPORTER", "").strip()
    exporters = [named] if named and named != "none" else []
    if not named and asked.exporters:  # By an endpoint.
        exporters = ["otlp"]
    if PROMETHEUS not in asked.exporters and (port is not None or not named):
        exporters.append(PROMETHEUS)
    changed = {"OTEL_METRICS_EXPORTER": ",".join(exporters)} if exporters else {}
    return changed if port is None else changed | {"OTEL_EXPORTER_PROMETHEUS_PORT": str(port)}


def _exported(runtime: Runtime) -> list[str]:
    """Returns where the metrics go, a line for each place."""
    settings = Settings.from_environ(os.environ)
    exporter = runtime.exporter
    if exporter is None:
        return ["metrics go nowhere" if settings.enabled else settings.reason]
    served = [f"metrics at {scrape_url(settings.prometheus_host, port)}" for port in exporter.ports]
    pushed = [endpoint for endpoint in exporter.endpoints if not (exporter.ports and endpoint.startswith("Prometheus"))]
    # Which variable it was says nothing: it may be one of ours.
    return [*served, *(f"metrics go by {endpoint.rpartition(' (OTEL_')[0] or endpoint}" for endpoint in pushed)]


def _publish(cache: TieredCache, options: argparse.Namespace, after: ExitStack) -> str:
    """Has the cache's events published, if that is wanted; returns how to follow them, or nothing.

    Raises:
        ValueError: They cannot be.
    """
    if options.publish is None:
        if options.replay is not None:
            raise ValueError("--replay needs --publish: there is nothing to be had again")
        return ""
    try:
        from kvcache_otel.demo.publisher import Publisher

        publisher = Publisher(options.publish, options.replay)
    except ImportError as error:
        raise ValueError(f"--publish: {error}: {how('demo')}") from error
    except Exception as error:  # ZeroMQ has its own, and they are none of the system's.
        where = f"--publish {options.publish}" + (f" --replay {options.replay}" if options.replay else "")
        raise ValueError(f"{one_line(where)}: {error}") from error
    after.callback(publisher.close)
    cache.sinks.append(publisher)
    replay = f"?replay={publisher.replay_endpoint}" if publisher.replay_endpoint else ""
    return f"KV events are published: kvcache-otel watch 'demo={publisher.endpoint}{replay}'"


def _cannot(why: str) -> int:
    print(f"kvcache-otel demo: {why}", file=sys.stderr)
    return 2
