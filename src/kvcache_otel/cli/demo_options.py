"""What ``kvcache-otel demo`` can be told on its command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvcache_otel.cli.ending import seconds
from kvcache_otel.demo.config import MEMORIES, POLICIES, Config
from kvcache_otel.demo.workload import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

RATE = 50.0
"""Steps of the scheduler in a second, unless told otherwise: enough to see something, and no load for a laptop."""

LIVE_SECONDS, LINES_SECONDS = 0.5, 10.0
"""Between two views in a terminal, and between two lots of lines in a pipe."""

MOST = 2**26
"""No option takes a number that is higher: these are gigabytes."""

_MOST = {"users": 2**16}
"""Where less is enough: each of them takes part in each step."""

_USUAL = {"users": 24, "prefix": 256, "device_tokens": 3072, "host_tokens": 6144, "disk_tokens": 16384}
"""Where it is not as the cache and the workload have it by themselves: every tier is needed, and a little too small."""

_SHAPE = {
    "users": "conversations at a time",
    "turns": "turns of a conversation, after which there is a new one",
    "prefix": "tokens that all conversations have in common",
    "turn_tokens": "tokens of a user's turn",
    "output_tokens": "tokens of an answer",
    "concurrency": "requests that run at a time",
    "seed": "seed of all that is drawn",
}
_CACHE = {
    "device_tokens": "size of the device tier",
    "host_tokens": "size of the host tier",
    "disk_tokens": "size of the disk tier; 0 for none",
    "page_tokens": "tokens in a page, which is what moves",
    "token_bytes": "bytes of KV for a token",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the command's parser."""
    workload = parser.add_argument_group("the workload")
    for name, what in _SHAPE.items():
        _add_number(workload, name, what, Shape, least=0 if name in ("prefix", "seed") else 1)
    cache = parser.add_argument_group("the cache, sizes in tokens")
    for name, what in _CACHE.items():
        _add_number(cache, name, what, Config, least=0 if name == "disk_tokens" else 1)
    cache.add_argument(
        "--policy",
        choices=POLICIES,
        default=Config.policy,
        help="whether what is computed is copied to the host at once, or when the device evicts it (%(default)s)",
    )
    cache.add_argument(
        "--memory",
        choices=MEMORIES,
        default=Config.memory,
        help="what holds the bytes of device and host; auto takes the first that is installed",
    )
    parser.add_argument(
        "--seconds", metavar="N", type=seconds, help="how long to run; until it is interrupted, otherwise"
    )
    parser.add_argument(
        "--rate",
        metavar="N",
        type=_rate,
        default=RATE,
        help="scheduler steps a second, 0 for all it can: in each of them every request that runs puts out "
        f"{Shape.decode_tokens} tokens (%(default)g)",
    )
    parser.add_argument(
        "--every",
        metavar="N",
        type=seconds,
        help=f"seconds between views ({LIVE_SECONDS:g}; {LINES_SECONDS:g} in a pipe)",
    )
    parser.add_argument("--port", metavar="N", type=_port, help="where Prometheus scrapes; 0 for any (9464)")
    parser.add_argument(
        "--publish", metavar="ENDPOINT", help="publish KV events for `kvcache-otel watch`: tcp://127.0.0.1:5557"
    )
    parser.add_argument(
        "--replay", metavar="ENDPOINT", help="where those that were missed can be had: tcp://127.0.0.1:5558"
    )


def given(kind: Callable[..., Any], options: argparse.Namespace) -> Any:
    """Returns a configuration with what was given on the command line."""
    values = vars(options)
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})  # type: ignore


def in_options(error: str) -> str:
    """Returns what is wrong with a configuration, in the words of the command line."""
    name, _, rest = error.partition(" ")
    return f"--{name.replace('_', '-')} {rest}" if name in {**_SHAPE, **_CACHE} else error


def _add_number(parser: argparse._ArgumentGroup, name: str, what: str, kind: type, *, least: int) -> None:  # pyright: ignore[reportPrivateUsage]
    most = _MOST.get(name, MOST)

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return int(text)

    usual: int = _USUAL[name] if name in _USUAL else getattr(kind, name)
    parser.add_argument(
        f"--{name.replace('_', '-')}", metavar="N", type=number, default=usual, help=f"{what} ({usual})"
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps a second, 0 or more")
    return rate


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")
    return int(text)
