"""The command line: what commands there are, and how they end."""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from kvcache_otel.cli import INTERRUPTED, demo, doctor, watch
from kvcache_otel.cli.report import reason
from kvcache_otel.cli.watch_output import OutputError
from kvcache_otel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage] # No other name.

# Each has `add_to(commands)`, which adds a parser whose default `run` takes the options and returns the exit status.
COMMANDS = (doctor, watch, demo)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows the program's name; None for the process's own.

    Returns:
        The exit status.
    """
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] # It was closed: then nobody wants to read.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser, commands = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # By itself argparse shows how to choose a command, though one was chosen.
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # It may know ASCII alone.
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        raise
    except BrokenPipeError:  # Whoever read our output has read enough.
        _drop_output()
        return 1
    except OutputError as error:
        print(f"kvcache-otel {options.command}: standard output cannot be written: {error}", file=sys.stderr)
        _drop_output()
        return 1
    except BaseException as error:  # Whatever an engine raises, SystemExit too, this is our command's end.
        print(f"kvcache-otel {options.command}: failed itself: {reason(error)}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Sends to nobody what standard output has kept back: Python must not complain of it at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> tuple[argparse.ArgumentParser, Commands]:
    parser = argparse.ArgumentParser(
        prog="kvcache-otel", description="OpenTelemetry metrics for the KV caches of LLM inference engines."
    )
    parser.add_argument("--version", action="version", version=f"kvcache-otel {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    return parser, commands
