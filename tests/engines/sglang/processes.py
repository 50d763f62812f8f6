"""Programs that use the real SGLang, run as processes of their own: of the release that is installed, or of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECKOUT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent

INSTALLED = "0.5.23"
OLDER = ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22")
"""The releases beside the one that is installed, as `tools/engine_env.py` puts them there."""

CORES = {version: ("python",) if version == "0.5.18" else ("python", "rust") for version in (*OLDER, INSTALLED)}
"""The tree cores of each release."""


class Ended(NamedTuple):
    """How a program ended.

    Attributes:
        status: Its exit status.
        out: Its standard output.
        err: Its standard error, SGLang's log in it.
    """

    status: int
    out: str
    err: str

    @property
    def ours(self) -> list[str]:
        """What we said on standard error, line by line, without the logger's beginning."""
        return [line[line.index("kvcache: ") :] for line in self.err.splitlines() if "kvcache: " in line]

    def result(self) -> dict[str, Any]:
        """The line of JSON that the program printed last: a native library may have printed before."""
        assert self.status == 0, self.err[-6000:]
        return json.loads([line for line in self.out.splitlines() if line.startswith('{"')][-1])


def run(
    command: Sequence[str | os.PathLike[str]],
    environ: Mapping[str, str] | None = None,
    *,
    version: str = INSTALLED,
    timeout_s: float = 180,
) -> Ended:
    """Runs a program to its end; of this process's variables it gets none that has to do with the matter.

    Args:
        command: The program and its arguments.
        environ: Variables that it gets besides.
        version: The release of SGLang that it imports.
        timeout_s: When it is taken for hung.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "SGLANG_", "PROMETHEUS_", "KVCACHE_", "PYTHON"))
    }
    if version != INSTALLED:
        inherited["PYTHONPATH"] = str(_folder(version))
    ended = subprocess.run(
        command,
        env={**inherited, **(environ or {})},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def run_module(
    name: str, *arguments: str | os.PathLike[str], environ: Mapping[str, str] | None = None, version: str = INSTALLED
) -> Ended:
    """Like `run`, a program of this folder."""
    return run([sys.executable, "-m", f"tests.engines.sglang.{name}", *arguments], environ, version=version)


def _folder(version: str) -> Path:
    """Where a release is; skips the test if it is not there, or fails it, as `tests.conftest.require` does."""
    folder = Path(sys.prefix, "versions", version)
    if not folder.is_dir():
        missing = f"SGLang {version} in {folder.parent} (`make test-engines`)"
        if "sglang" in os.environ.get("KVCACHE_OTEL_REQUIRE", "").split(","):
            pytest.fail(f"KVCACHE_OTEL_REQUIRE demands sglang, but this is missing: {missing}")
        pytest.skip(f"needs {missing}")
    return folder
