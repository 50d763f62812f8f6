"""What is published and what arrives: alike beside the publisher and with a replay, not alike without one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from examples.router_view.__main__ import TIERS, run

from kvcache_otel.instrumentation import instrumentation
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _detached() -> Iterator[None]:
    yield
    instrumentation.detach()


def test_what_was_lost_is_known_and_what_was_replayed_is_right() -> None:
    threads = set(threading.enumerate())
    said: list[str] = []
    (held, published, direct, lossy, mended), lost = run(3, 5, said.append)
    assert lost > 10
    assert held.blocks == published.blocks == direct.blocks == mended.blocks
    assert min(published.blocks.values()) > 100
    assert (direct.lost, direct.recovered) == (0, 0)
    assert (lossy.lost, lossy.recovered) == (lost, 0)
    assert (mended.lost, mended.recovered) == (0, lost)
    assert lossy.blocks != published.blocks
    assert len(said) == 4
    for row in (published, lossy, mended):
        assert re.search("^.*" + row.view + " +" + " +".join(str(row.blocks[tier]) for tier in TIERS), said[-1], re.M)
    instrumentation.detach()
    wait_until(lambda: set(threading.enumerate()) <= threads, what=f"{threading.enumerate()}")


def test_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.router_view", "--rounds", "2", "--one-of", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^(round \d|at rest), the link has lost \d+ batches$", done.stdout, re.M) == [
        "round 1",
        "round 2",
        "at rest",
    ]
    (lost,) = re.findall(r"^at rest, the link has lost (\d+) batches$", done.stdout, re.M)
    last = done.stdout.rpartition("at rest")[2]
    assert re.search(rf"^received: lossy .* {lost} +0$", last, re.M)
    assert re.search(rf"^received: mended .* 0 +{lost}$", last, re.M)


@pytest.mark.parametrize("module", ["zmq", "msgspec"])
def test_without_its_libraries_it_names_what_to_install(module: str) -> None:
    without = f"import sys, runpy; sys.modules[{module!r}] = None; sys.argv = ['x']; runpy.run_module"
    done = subprocess.run(
        [sys.executable, "-c", f"{without}('examples.router_view', run_name='__main__')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert module in line
    assert line.endswith(": pip install '.[demo]'")


@pytest.mark.parametrize("one_of", ["1", "x", "-3"])
def test_a_share_that_is_none(one_of: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.router_view", f"--one-of={one_of}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"{one_of!r} is no number from 2 to 1000")


def test_ctrl_c_ends_it_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "examples.router_view"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("round 1"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does it: who watches is told too.
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "")
