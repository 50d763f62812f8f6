"""The engine on a page: it answers rightly, what is measured is what it did, and it is given back as it was."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from examples.own_engine.__main__ import converse
from examples.own_engine.engine import BYTES, TOKENS, Blocks, Engine, Match
from examples.own_engine.measured import measure
from examples.reading import Reading

from kvcache_otel.instrumentation import instrumentation

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


class Watched(Engine):
    """The engine, whose tiers are looked at before and after whatever it does.

    Attributes:
        truth: What was seen, in blocks.
    """

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        super().__init__(device_blocks, host_blocks)
        self.truth: Counter[str] = Counter()

    def admit(self, prompt: int, blocks: Blocks) -> Match:
        device, host = set(self.device), set(self.host)
        self.truth["prompt"] += prompt
        place = 0
        for tier, there in (("device", device), ("host", host)):
            while place < len(blocks) and blocks[place] in there:
                self.truth[f"served {tier}"] += 1
                place += 1
        return super().admit(prompt, blocks)

    def load_back(self, blocks: Blocks) -> None:
        before = set(self.device)
        super().load_back(blocks)
        new = set(self.device) - before
        self.truth["loaded"] += len(new)
        self.truth["loads"] += bool(new)

    def write_back(self, blocks: Blocks) -> Blocks:
        before = set(self.host)
        new = super().write_back(blocks)
        self.truth["written"] += len(set(self.host) - before)
        self.truth["writes"] += bool(set(self.host) - before)
        return new

    def make_room(self, count: int) -> Blocks:
        before = set(self.device)
        gone = super().make_room(count)
        self.truth["evicted device"] += len(before - set(self.device))
        return gone

    def make_host_room(self, count: int) -> Blocks:
        before = set(self.host)
        gone = super().make_host_room(count)
        lost = before - set(self.host)
        self.truth["evicted host"] += len(lost)
        self.truth["lost"] += len(lost - set(self.device))
        return gone


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    instrumentation.detach()
    made.close()


def agrees(reading: Reading, engine: Watched) -> None:
    """Compares every row with what was seen."""
    truth = {name: count * TOKENS for name, count in engine.truth.items()}
    device, host = truth.get("served device", 0), truth.get("served host", 0)
    prompt = engine.truth["prompt"]
    assert reading.values("kvcache.lookup.tokens") == {"device": device, "host": host, "none": prompt - device - host}
    loaded, written = engine.truth["loaded"], engine.truth["written"]
    assert reading.values("kvcache.transfer.tokens") == {
        "host device kv": loaded * TOKENS,
        "device host kv": written * TOKENS,
    }
    assert reading.values("kvcache.transfer.io") == {
        "host device wall_clock": loaded * BYTES,
        "device host wall_clock": written * BYTES,
    }
    assert reading.values("kvcache.transfer.operations") == {
        "host device": engine.truth["loads"],
        "device host": engine.truth["writes"],
    }
    assert reading.values("kvcache.eviction.tokens") == {
        "device kv": truth.get("evicted device", 0),
        "host kv": truth.get("evicted host", 0),
    }
    assert reading.values("kvcache.dropped.tokens") == {
        "host kv host_pressure": truth.get("lost", 0),
        "host kv other": 0,
    }
    assert reading.values("kvcache.resident.blocks") == {
        "device held": len(engine.device),
        "host held": len(engine.host),
    }
    for tier, held, blocks in (
        ("device", engine.device, engine.device_blocks),
        ("host", engine.host, engine.host_blocks),
    ):
        usage = {key: value for key, value in reading.values("kvcache.usage").items() if key.startswith(tier)}
        assert usage == {
            f"{tier} kv used": len(held) * TOKENS,
            f"{tier} kv free": (blocks - len(held)) * TOKENS,
        }
        assert reading.values("kvcache.limit")[f"{tier} kv"] == blocks * TOKENS
    assert set(reading.values("kvcache.transfer.active").values()) == {0}
    assert not any(reading.values("kvcache.accounting.errors").values())
    assert not any(reading.values("kvcache.telemetry.errors").values())


@pytest.mark.parametrize(("device", "host"), [(24, 48), (20, 4), (100, 1), (20, 1000)])
def test_what_is_measured_is_what_it_did(reading: Reading, device: int, host: int) -> None:
    engine = Watched(device, host)
    handle = measure(engine, reading.provider)
    assert not handle.missing
    agrees(reading, engine)  # All rows are there, at zero.
    rng = random.Random(device + host)
    for _ in range(40):
        shared, own = rng.randrange(150), rng.randrange(150)
        engine.generate([*range(shared), *(rng.randrange(3) for _ in range(own))])
        agrees(reading, engine)
    reading.settle()
    counts = {key: count for key, (count, _) in reading.times("kvcache.transfer.duration").items() if count}
    assert counts.get("host device wall_clock", 0) == engine.truth["loads"]
    assert counts.get("device host wall_clock", 0) == engine.truth["writes"]
    handle.remove()
    assert not [name for name in vars(engine) if name not in vars(Watched(1, 1))]


def test_an_answer_does_not_depend_on_where_it_comes_from() -> None:
    rng = random.Random(1)
    small = Engine(10, 4)
    for _ in range(200):
        prompt = [*range(rng.randrange(100)), *(rng.randrange(3) for _ in range(rng.randrange(60)))]
        assert small.generate(prompt) == Engine(10, 4).generate(prompt)
        assert len(small.device) <= 10
        assert len(small.host) <= 4


def test_a_prompt_that_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"^33 tokens: the device has room for 16$"):
        Engine(1, 1).generate(list(range(33)))


def test_it_runs_and_shows_what_it_did() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.own_engine"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    engine = Watched(24, 48)
    assert f"Prompts of {converse(engine):,} tokens." in done.stdout
    shown = {tuple(line.split()[:-1]): line.split()[-1] for line in done.stdout.splitlines() if line}
    truth = {name: count * TOKENS for name, count in engine.truth.items()}
    assert shown["device",] == f"{truth['served device']:,}"
    assert shown["host",] == f"{truth['served host']:,}"
    assert shown["device", "host", "kv"] == f"{truth['written']:,}"
    assert shown["host", "kv", "host_pressure"] == f"{truth['lost']:,}"
    assert shown["device", "held"] == str(len(engine.device))
    assert all(truth[name] for name in ("served device", "served host", "written", "loaded", "lost"))
