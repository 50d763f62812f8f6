"""The example of a real vLLM, where there is none; where there is one it is run by the tests of that engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_vllm_it_says_how_to_have_one() -> None:
    program = "import sys, runpy; sys.modules['vllm'] = None; sys.argv = ['x']; runpy.run_module"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}('examples.vllm_cpu', run_name='__main__')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = "examples.vllm_cpu: this Python has no vLLM: `make demo-vllm` makes one that has\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
