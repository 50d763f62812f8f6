#!/usr/bin/env python3
"""Turn the catalogue, `model/kvcache.yaml`, into everything that is derived from it.

    python tools/generate.py            write the outputs
    python tools/generate.py --check    write nothing; exit with 1 and name each output that differs

The catalogue is validated first: a metric that breaks a naming rule, or that lacks what a reader needs to interpret it,
never reaches an output. To derive one more file from the catalogue, add its path and its renderer to `OUTPUTS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from catalogue import COMMAND, MODEL
from catalogue.loading import load
from catalogue.model import Model, ModelError
from catalogue.render_docs import render_docs
from catalogue.render_semconv import render_semconv

ROOT = Path(__file__).resolve().parent.parent

Renderer = Callable[[Model], str]

OUTPUTS: tuple[tuple[str, Renderer], ...] = (
    ("src/kvcache_otel/semconv.py", render_semconv),
    ("docs/metrics.md", render_docs),
)


def drifted(model: Model, root: Path) -> Iterator[str]:
    """The outputs under `root` that are not what the model says."""
    for name, render in OUTPUTS:
        path = root / name
        if not path.exists() or path.read_text(encoding="utf-8") != render(model):
            yield name


def write(model: Model, root: Path) -> None:
    """Write every output under `root`."""
    for name, render in OUTPUTS:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(model), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Generate what is derived from the catalogue.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where an output differs")
    options = parser.parse_args(arguments)
    try:
        model = load(root / MODEL)
    except ModelError as error:
        print(*(f"{MODEL}: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return 1
    if not options.check:
        write(model, root)
        return 0
    stale = list(drifted(model, root))
    for name in stale:
        print(f"{name} is not what {MODEL} says; run `{COMMAND}`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
