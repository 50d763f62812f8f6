"""Work that may hang, done where nobody has to wait for it longer than they want to."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger(__name__)

EXIT_DEADLINE_S = 3.0


class Prepared:
    """One job on a thread that is there already: an interpreter that shuts down starts no new ones (Python 3.12)."""

    def __init__(self, job: Callable[[], object], name: str) -> None:
        """Args:
        job: Runs once, when it is first asked for.
        name: The thread's name.
        """
        self._job = job
        self._pid = os.getpid()
        self._asked = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def run(self, timeout_s: float) -> bool:
        """Asks for the job and waits for it; returns whether it ended in time. Asking again only waits again.

        In a forked child, where the thread is not, nothing is done.
        """
        if os.getpid() != self._pid:
            return False
        self._asked.set()
        return self._done.wait(max(timeout_s, 0))

    def _wait(self) -> None:
        self._asked.wait()
        try:
            self._job()
        except Exception as error:
            _logger.debug("kvcache: %s: %r", self._thread.name, error)
        finally:
            self._done.set()


def run_within(job: Callable[[], object], timeout_s: float, name: str) -> bool:
    """Runs a job on a daemon thread; returns whether it ended without an exception, in time.

    Raises:
        RuntimeError: No thread can be started: the interpreter is shutting down, or the process has too many.
    """
    succeeded = threading.Event()
    ended = threading.Event()

    def run() -> None:
        try:
            job()
            succeeded.set()
        except Exception as error:
            _logger.debug("kvcache: %s: %r", name, error)
        finally:
            ended.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended.wait(max(timeout_s, 0)) and succeeded.is_set()
