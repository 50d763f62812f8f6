"""Histogram samples for a provider that is not ours."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.export import replay as replay_module
from kvcache_otel.export.replay import Replay
from tests.export.journal import IDENTITY, SAMPLES, TRANSFER, Journal, said
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections import deque


class Recording:
    """Stands in for an OTel histogram."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, dict[str, Any]]] = []

    def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        self.samples.append((amount, dict(attributes)))


@pytest.fixture
def journal() -> Journal:
    return Journal(replay=True)


def test_flush_records_every_sample(journal: Journal) -> None:
    histogram = Recording()
    replay = Replay(queue(journal), {"kvcache.transfer.duration": histogram})  # pyright: ignore[reportArgumentType]
    journal.transfer(*SAMPLES)
    replay.flush()
    assert histogram.samples == [(sample, IDENTITY | TRANSFER) for sample in SAMPLES]
    replay.stop()


def test_the_thread_records_without_being_asked(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "INTERVAL_S", 0.01)
    histogram = Recording()
    replay = Replay(queue(journal), {"kvcache.transfer.duration": histogram})  # pyright: ignore[reportArgumentType]
    journal.transfer(*SAMPLES)
    wait_until(lambda: len(histogram.samples) == len(SAMPLES))
    replay.stop()


def test_stop_records_what_is_left_and_ends_the_thread(journal: Journal) -> None:
    histogram = Recording()
    replay = Replay(queue(journal), {"kvcache.transfer.duration": histogram})  # pyright: ignore[reportArgumentType]
    journal.transfer(1.0)
    replay.stop()
    assert len(histogram.samples) == 1
    wait_until(lambda: not any(thread.name == "kvcache-replay" for thread in threading.enumerate()))


def test_a_round_is_bounded_and_a_flush_ends_though_samples_keep_coming(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "INTERVAL_S", 3600.0)

    class Growing(Recording):
        def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
            super().record(amount, attributes)
            journal.transfer(amount)

    histogram = Growing()
    replay = Replay(queue(journal), {"kvcache.transfer.duration": histogram})  # pyright: ignore[reportArgumentType]
    journal.transfer(1.0, 1.0)
    replay.flush()
    assert len(histogram.samples) == 2


def test_samples_nobody_wants_are_thrown_away(journal: Journal) -> None:
    replay = Replay(queue(journal), {})
    journal.transfer(*SAMPLES)
    replay.flush()
    assert not queue(journal)
    replay.stop()


def test_a_provider_that_raises_loses_its_sample_only(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    counter = itertools.count()

    class Raising(Recording):
        def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
            if next(counter) < 2:
                raise ValueError("no")
            super().record(amount, attributes)

    histogram = Raising()
    replay = Replay(queue(journal), {"kvcache.transfer.duration": histogram})  # pyright: ignore[reportArgumentType]
    journal.transfer(1.0, 2.0, 3.0)
    with caplog.at_level(logging.WARNING, "kvcache_otel"):
        replay.flush()
    assert [sample for sample, _ in histogram.samples] == [3.0]
    assert len(said(caplog)) == 1
    replay.stop()


def queue(journal: Journal) -> deque[Any]:
    assert journal.recorder.replayed is not None
    return journal.recorder.replayed
