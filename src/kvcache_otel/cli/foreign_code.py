"""Runs code of somebody else's: whatever it raises is a finding, and what it writes does not get into our output."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import sys
import warnings
from typing import TYPE_CHECKING

from kvcache_otel.cli.report import reason, words

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


NO_MODULE = "there is no module"
"""How `try_import` begins where it is that."""

_ran = False


def leave(status: int) -> None:
    """Ends the process at once where such code has run: it may have left threads, and things to be done at exit."""
    if _ran:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def try_import(module: str) -> str:
    """Returns why a module cannot be imported; empty where it can."""
    try:
        importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return f"{NO_MODULE} {words(error.name)}"
        return f"importing {module} fails: {reason(error)}"
    return ""


@contextlib.contextmanager
def quiet(environ: Mapping[str, str]) -> Generator[None]:
    """Lets the code say nothing: its standard output would get into ours.

    Args:
        environ: Variables that have it say less.
    """
    global _ran
    _ran = True
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        with _elsewhere(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _elsewhere() -> Generator[None]:
    """Sends to standard error what is written to file descriptor 1, as libraries do that know no Python."""
    _flush()
    kept: int | None = None
    with contextlib.suppress(OSError):  # One of them is closed.
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        yield
    finally:
        _flush()
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _flush() -> None:
    """Writes out what waits for file descriptor 1, in Python and in the C library."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)
    if sys.__stdout__ is not None:
        with contextlib.suppress(Exception):
            sys.__stdout__.flush()
