"""``kvcache-otel watch``: the router's side, as a process of its own: it subscribes to KV events and adds them up.

Its libraries come with the extra ``watch``; they are imported when the command runs.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache_otel.cli.ending import Stop, seconds
from kvcache_otel.cli.extras import how
from kvcache_otel.cli.watch_output import LogHandler, OutputError
from kvcache_otel.export.settings import Settings

if TYPE_CHECKING:
    import argparse

    from kvcache_otel.cli.command import Commands
    from kvcache_otel.events.discovery import Discovery
    from kvcache_otel.events.source import Source

_logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.25
"""How long the loop waits for messages before it looks whether it is to end, or whether there are other sources."""

LIVE_SECONDS, LINES_SECONDS = 1.0, 10.0
"""Between two tables in a terminal, and between two lots of lines in a pipe."""

SOURCE = (
    "[name=]tcp://host:port[?engine=auto|vllm|sglang&replay=tcp://host:port&topic=TOPIC&block_size=TOKENS"
    "&clears=all|device]"
)


def add_to(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "watch",
        help="subscribe to KV events, and export what they add up to",
        description="Subscribes to the KV events that engines publish, keeps the books by worker, data-parallel rank "
        "and tier, and says when they cannot be trusted. Exports as everywhere: the OTEL_* variables say where to.",
        epilog=f"A SOURCE is {SOURCE}. dns+tcp://name:port is every address that a name resolves to; with tcp://*:port "
        "publishers connect to this process. Sources of one name are ranks of one worker.",
    )
    parser.add_argument("source", metavar="SOURCE", nargs="*", help="where events are published")
    parser.add_argument(
        "--sources", metavar="FILE", type=Path, help="more sources, one a line; read again when it changes"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print a table after some seconds, and end; 1 is returned where no source was connected",
    )
    parser.add_argument(
        "--seconds", metavar="N", type=seconds, help="how long to watch; until it is interrupted, and 5 with --once"
    )
    parser.add_argument(
        "--every",
        metavar="N",
        type=seconds,
        help=f"seconds between tables ({LIVE_SECONDS:g}; {LINES_SECONDS:g} in a pipe)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        Its exit status: 0 if it was told to end, 1 if it was to look once and nothing could be reached, 2 if there was
        nothing to watch.
    """
    try:
        import msgspec
        import zmq

        if sys.stdout.isatty():
            import rich

            del rich
    except ImportError as error:
        print(f"kvcache-otel watch: {error}: {how('watch')}", file=sys.stderr)
        return 2
    del msgspec, zmq
    level = logging.WARNING if options.once else logging.INFO  # One table: what else comes and goes is no news.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level, handlers=_handlers())
    from kvcache_otel.events.agreement import agree
    from kvcache_otel.events.discovery import Discovery
    from kvcache_otel.events.source import SourceError, parse

    try:
        given, wrong = agree([parse(text) for text in options.source])
    except SourceError as error:
        given, wrong = [], [str(error)]
    if wrong:
        print(f"kvcache-otel watch: {wrong[0]}", file=sys.stderr)
        return 2
    if not given and options.sources is None:
        print(f"kvcache-otel watch: there is no SOURCE: {SOURCE}", file=sys.stderr)
        return 2
    discovery = Discovery(given, options.sources)
    if not discovery.found and discovery.problems and not any(source.is_many for source in given):
        return 2  # It has said why. What is not there when it starts is more likely wrong than late.
    try:
        return _watch(options, discovery)
    except OutputError as error:
        _flush()
        print(f"kvcache-otel watch: standard output cannot be written: {error}", file=sys.stderr)
        return 1


def _flush() -> None:
    """Waits until the log is written, so that what is said next comes after it."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _settle() -> None:
    """Has the log say what it has kept back of late."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler):
            handler.settle()


def _handlers() -> list[logging.Handler] | None:
    """Returns what the log goes to; None for standard error as it is."""
    try:
        return [LogHandler()]
    except (OSError, AttributeError):  # There is none, or no file behind it.
        return None


def _allow_many_sockets() -> None:
    """Takes as many files as there may be: each source needs five, and a shell gives a process a thousand."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        _logger.debug("kvcache: no more files than before", exc_info=True)


def _watch(options: argparse.Namespace, discovery: Discovery) -> int:
    from kvcache_otel.cli.watch_view import is_drawn, view
    from kvcache_otel.events.discovery import MOST_SOURCES
    from kvcache_otel.events.index import BlockIndex, series
    from kvcache_otel.events.room import FURTHER
    from kvcache_otel.events.watch import Watch
    from kvcache_otel.export.provider import needs_replay, start
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.recorder import Recorder
    from kvcache_otel.semconv import KVCACHE_TELEMETRY_HOOK, TELEMETRY_ERRORS, Engine

    stop = Stop()
    _allow_many_sockets()
    settings = Settings.from_environ(os.environ)
    recorder = Recorder(
        Identity(Engine.CUSTOM, BlockIndex.__name__),
        replay=needs_replay(settings),
        series_limit=series(MOST_SOURCES + FURTHER),
    )
    exporter = start(recorder, settings)
    complaints = recorder.counter(TELEMETRY_ERRORS, {KVCACHE_TELEMETRY_HOOK: "watch.sources"})
    watch = Watch(BlockIndex(recorder, further=FURTHER))
    discovery.start()
    lasting = options.seconds or (5.0 if options.once else None)
    end = float("inf") if lasting is None else time.monotonic() + lasting
    every = options.every or (LIVE_SECONDS if is_drawn() else LINES_SECONDS)
    known: tuple[Source, ...] | None = None
    found_wrong = 0
    next_view = time.monotonic() + every
    reached = True
    try:
        with view(recorder, watch, once=options.once, asked=lambda: stop.asked) as show:
            while not stop.asked and (now := time.monotonic()) < end:
                found = discovery.found
                if found is not known:
                    known = found
                    watch.want(found)
                found_wrong, before = discovery.complaints, found_wrong
                complaints.add(found_wrong - before)
                watch.poll(min(ROUND_SECONDS, end - now))
                _settle()
                if time.monotonic() >= next_view:
                    show(last=False)
                    next_view = time.monotonic() + every
            show(last=True)
        reached = watch.greeted
    finally:
        discovery.stop()
        if exporter is not None:
            exporter.stop(1.0)
        watch.close()
    if options.once and not (reached or stop.asked):
        _flush()
        print("kvcache-otel watch: no source was connected", file=sys.stderr)
        return 1
    return 0
