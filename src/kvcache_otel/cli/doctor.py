"""``kvcache-otel doctor``: says what would be measured in this installation, what would not, and where it would go.

It really imports the engine, or makes the cache, and really attaches the hooks, in its own process, but exports nothing
and opens nothing.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvcache_otel.cli import checks
from kvcache_otel.cli.engine import examine
from kvcache_otel.cli.report import Report, failure, to_json, to_text
from kvcache_otel.export.settings import Settings
from kvcache_otel.instrumentation import ENGINES
from kvcache_otel.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Mapping, Sequence

    from kvcache_otel.cli.command import Commands

_PACKAGES = ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-instrumentation")


def add_to(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="say what would be measured here, and where it would go",
        description="Says what would be measured in this installation, what would not, and where it would go. The exit "
        "status is 0 if something would be measured and exported, else 1.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "cache",
        nargs="?",
        metavar="MODULE[:NAME]",
        help="a cache of your own: a module that makes it, or an object or a function without arguments in one",
    )
    which.add_argument("--engine", choices=sorted(ENGINES), help="the engine to look at, if not every one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    if options.cache is not None:
        report = diagnose_own(options.cache, os.environ)
    else:
        report = diagnose([options.engine] if options.engine else list(ENGINES), os.environ)
    print(to_json(report) if options.json else to_text(report, shutil.get_terminal_size().columns))
    return report.status


def diagnose(engines: Sequence[str], environ: Mapping[str, str]) -> Report:
    """Looks at everything that has a part in it.

    Args:
        engines: Some of `ENGINES`.
        environ: The environment that the engine would find.
    """
    with _silence():
        found = [engine for name in engines if (engine := examine(name, environ)) is not None]
        report = Report(
            _versions(), found, checks.export(Settings.from_environ(environ), environ), checks.installation()
        )
    if not found:
        report.installation.append(
            failure(
                f"no engine is installed for this Python ({' or '.join(engines)})",
                "install one, and run the doctor with the Python that runs it; or name a cache of your own: "
                "kvcache-otel doctor MODULE:NAME",
            )
        )
    return report


def diagnose_own(target: str, environ: Mapping[str, str]) -> Report:
    """Looks at everything that has a part in a cache of the program's own.

    Args:
        target: Where that is; see `own.examine`.
        environ: The environment that the program would find.
    """
    from kvcache_otel.cli import own  # It takes longer to import than all else that the command line needs.

    with _silence():
        found = own.examine(target)
        settings = Settings.from_environ(environ)
        export = checks.provided(settings, environ) if found.provided else checks.export(settings, environ)
        return Report(_versions(), found.reports, export, checks.interpreter())


def _versions() -> dict[str, str]:
    packages = {name: _version(name) for name in _PACKAGES}
    return {"kvcache-otel": __version__, "python": platform.python_version(), **packages}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


@contextmanager
def _silence() -> Generator[None]:
    """Keeps quiet whatever is imported; what matters of it is in the report."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
