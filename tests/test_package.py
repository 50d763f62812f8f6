"""The package's own names: all there, found by who looks, and imported when they are used."""

from __future__ import annotations

import subprocess
import sys

import kvcache_otel


def test_every_public_name_is_there_and_is_listed() -> None:
    assert set(kvcache_otel.__all__) <= set(dir(kvcache_otel))
    assert len(kvcache_otel.__all__) > 20
    for name in kvcache_otel.__all__:
        assert getattr(kvcache_otel, name) is not None


def test_who_lists_the_names_imports_nothing() -> None:
    program = (
        "import sys, kvcache_otel; names = dir(kvcache_otel); "
        "ours = [name for name in sys.modules if name.startswith(('kvcache_otel.', 'opentelemetry'))]; "
        "print('Backup' in names, ours)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True ['kvcache_otel.version']\n"
