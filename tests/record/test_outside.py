"""What a signal handler raises reaches the engine, wherever it was; what we or our readers raise does not."""

from __future__ import annotations

import ctypes
import gc
import random
import signal
import sys
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.record import complaints, outside
from kvcache_otel.record.streams import CURRENT
from tests.record.test_transfers import ENOUGH_S, Scene
from tests.support.alarms import interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class TooLongError(Exception):
    """What an engine's own timeout raises."""


class TooLongIndeed(BaseException):
    """The same, of a library that wants nobody to catch it."""


def fail(*_: Any) -> None:
    raise TooLongError("the engine's timeout")


class Handler:
    """An engine's, in all shapes."""

    def __call__(self, number: int, frame: Any) -> None:
        fail()

    def method(self, number: int, frame: Any = None) -> None:
        try:
            fail()
        except TooLongError as error:
            raise TooLongIndeed from error

    @staticmethod
    def closed(_: int, frame: Any) -> None:
        (lambda: fail(frame))()


HANDLERS: dict[str, Callable[..., None]] = {
    "star": fail,
    "lambda": lambda *_: fail(),
    "partial": partial(lambda more, number, frame: fail(more, number, frame), "more"),
    "object": Handler(),
    "method": Handler().method,
    "closure": Handler.closed,
    "keywords": lambda number, frame, *, more=None, **others: fail(),
}


@pytest.fixture(params=HANDLERS)
def handled(request: pytest.FixtureRequest) -> Generator[None]:
    previous = signal.signal(signal.SIGUSR1, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.usefixtures("handled")
def test_a_signal_handlers_exception_between_our_own_lines_goes_through() -> None:
    interrupts = partial(signal.raise_signal, signal.SIGUSR1)  # It runs when this returns, in whoever called it.
    scene = Scene(make_event=lambda: SimpleNamespace(record=interrupts))
    with pytest.raises((TooLongError, TooLongIndeed)):
        scene.transfers.begin(bytes=1, stream=CURRENT)
    assert (scene.active, scene.failed(), scene.lost(), len(scene.transfers._keys)) == (0, None, 0, 0)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("said", ["bytes", "tokens", "events", "at", "error"])
def test_a_signal_handlers_exception_in_what_we_call_goes_through(said: str) -> None:
    class Interrupts:
        def __index__(self) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return 1

        __rsub__ = __sub__ = __iter__ = __index__  # type: ignore[assignment]

    class Named(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            signal.raise_signal(signal.SIGUSR1)
            return "x"

    class OddError(Exception, metaclass=Named):
        pass

    scene = Scene()
    copy = scene.transfers.begin(bytes=1)
    with pytest.raises((TooLongError, TooLongIndeed)):
        copy.end(**{said: OddError if said == "error" else Interrupts()})
    assert (scene.active, scene.failed(), scene.lost("other")) == (0, None, 1)


@pytest.mark.usefixtures("handled")
def test_one_that_began_by_its_key_and_was_interrupted_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(queued=True)
    waited = scene.transfers.waited
    monkeypatch.setattr(scene.transfers, "waited", lambda _: (waited(1.0), signal.raise_signal(signal.SIGUSR1)))
    with pytest.raises((TooLongError, TooLongIndeed)):
        scene.transfers.begin(bytes=1, key=5, requested=0.0)
    assert (scene.active, scene.transfers.open_keys) == (0, 0)


class Frames:
    """What raises by itself, with whatever a handler has too."""

    def by_itself(self) -> None:
        raise TooLongError

    def with_a_frame(self) -> None:
        frame = sys._getframe()
        self.looks_at("it", frame)

    def looks_at(self, _: str, frame: Any) -> None:
        raise TooLongError

    def counts(self) -> None:
        self.adds(1, None)

    def adds(self, *_: Any) -> None:
        raise TooLongError


@pytest.mark.parametrize("raises", ["by_itself", "with_a_frame", "counts"])
def test_what_is_no_handlers_does_not_go_through(raises: str) -> None:
    error: BaseException | None = None
    try:
        getattr(Frames(), raises)()
    except TooLongError as raised:
        error = raised
    assert error is not None
    assert outside.is_from_outside(error) is False


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt()])
def test_what_ends_a_process_goes_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        outside.let_through(error)


def test_every_alarm_reaches_the_engine_and_nothing_stays_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complaints._logger, "disabled", True)  # What logging swallows is not ours.
    scene = Scene(deadline_s=0.05)

    def step() -> None:
        scene.transfers.begin(bytes=1).end()
        with scene.transfers.transfer(bytes=1):
            pass
        scene.transfers.begin(bytes=1, key="same")
        scene.transfers.end("same")
        scene.transfers.begin().cancel()

    fired, got = interrupt(step, TooLongError, 2.0)
    assert got == fired > 100
    if scene.transfers.open_keys:
        scene.transfers.end("same")
    gc.collect()  # Tracebacks are let go.
    time.sleep(0.06)
    scene.transfers.look_after()
    assert (scene.active, scene.failed()) == (0, None)


def test_what_another_thread_has_raised_in_ours_goes_through() -> None:
    scene, outcome = Scene(), list[type | None]()

    def engine() -> None:
        try:
            while not stop.is_set():
                for _ in range(100):
                    scene.transfers.begin(bytes=1).end()
        except TooLongError as error:
            outcome.append(type(error))

    for _ in range(60):
        stop = threading.Event()
        thread = threading.Thread(target=engine)
        thread.start()
        time.sleep(random.uniform(0.001, 0.004))
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TooLongError))
        thread.join(0.5)
        stop.set()
        thread.join(ENOUGH_S)
    assert outcome == [TooLongError] * 60
    assert scene.failed() is None


def test_what_was_looked_at_is_let_go_of() -> None:
    """It may have an engine's tensors."""

    class Event:
        def query(self) -> bool:
            raise ValueError("no device")

    scene, event = Scene(timing="device_event"), Event()
    gone = weakref.ref(event)
    gc.disable()
    try:
        scene.transfers.begin().end(events=(event, event))  # pyright: ignore[reportArgumentType]
        del event
        assert gone() is None
    finally:
        gc.enable()
