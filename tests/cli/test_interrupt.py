"""Ctrl-C ends every command quietly, at whatever moment it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# Sends the process a SIGINT when it begins to import something.
AT_IMPORT = """
import os, signal, sys

def hook(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
"""
AT_EXIT = "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
PROGRAM = "from kvcache_otel.cli import main; sys.exit(main())"


def run(before: str, *arguments: str, ignoring: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", before + PROGRAM, *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignoring else None,
    )


@pytest.mark.parametrize(
    "module",
    ["kvcache_otel.cli.foreign_code", "kvcache_otel.cli.command", "argparse", "dataclasses", "kvcache_otel.cli.watch"],
)
def test_while_the_command_line_is_imported(module: str) -> None:
    done = run(AT_IMPORT.format(module=module), "demo")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("kvcache_otel.demo.cache", ["demo", "--port", "0"]),
        ("zmq", ["watch", "tcp://127.0.0.1:1"]),
        ("kvcache_otel.cli.own", ["doctor", "json"]),
    ],
)
def test_while_a_command_imports_what_it_needs(module: str, arguments: list[str]) -> None:
    done = run(AT_IMPORT.format(module=module), *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [["--version"], ["demo", "--seconds", "0.1", "--port", "0"]], ids=" ".join)
def test_while_the_process_ends(arguments: list[str]) -> None:
    done = run(AT_EXIT, *arguments)
    assert done.returncode == 130
    assert done.stdout
    assert not [line for line in done.stderr.splitlines() if not line.startswith("kvcache-otel demo: metrics at ")]


def test_where_it_is_ignored_it_stays_so() -> None:
    done = run(AT_IMPORT.format(module="kvcache_otel.cli.command"), "--version", ignoring=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvcache-otel ")
