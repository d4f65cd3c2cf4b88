"""Interrupts that are not lost, for a run of pytest.

Python drops the exception of one that falls into a destructor, and the run would go on; pytest stumbles over one that
falls between two lines, and the run would pass for one that ended by itself. SIGTERM counts as one: whoever ends a run
with it, as CI does, gets the report of what was judged.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# pytest's codes of a run that did not come to its end
BROKEN_DOWN = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)


class Heed:
    """A plugin. came: whether a signal came, also one whose exception was dropped."""

    came = False

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Raise KeyboardInterrupt where a signal falls, in the main thread; signals come to no other."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: Any) -> None:
        self.came = True
        raise KeyboardInterrupt

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        if self.came:  # nothing is reported after one that was not dropped
            raise KeyboardInterrupt

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Leave out the frames that were between two lines: they have no number, and pytest, which draws them before it
        notes that the run was interrupted, raises TypeError."""
        excinfo.traceback = excinfo.traceback.filter(lambda entry: entry._rawentry.tb_lineno is not None)
