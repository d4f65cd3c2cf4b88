"""Progress of a long run: one line that is rewritten on a terminal, a line every ten seconds elsewhere.

What compiles is shown like what is judged.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from conformance.cases import Case
from conformance.isolation.remote import RemoteBackend
from conformance.ledger import Ledger

_PERIOD_TERMINAL, _PERIOD_FILE = 0.2, 10.0
_WIDTH = 78


class _Line:
    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._terminal = sys.stdout.isatty()
        self._period = _PERIOD_TERMINAL if self._terminal else _PERIOD_FILE
        self._shown = time.monotonic()
        self._open = False

    def due(self) -> bool:
        return time.monotonic() - self._shown >= self._period

    def show(self, text: str) -> None:
        if not self.due():
            return
        self._shown = time.monotonic()
        self._write(f"\r{text[:_WIDTH]:<{_WIDTH}}" if self._terminal else f"\n{text}")
        self._open = True

    def close(self) -> None:
        if self._open:
            self._write("\r" + " " * _WIDTH + "\r" if self._terminal else "\n")
            self._open = False


class Progress:
    """Of judging."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._line = _Line(write)
        self._start = time.monotonic()

    def show(self, ledger: Ledger) -> None:
        if not self._line.due():
            return
        now = time.monotonic()
        done, planned = len(ledger.verdicts), max(len(ledger.planned), 1)
        failing = sum(v.fails for v in ledger.verdicts.values())
        left = (now - self._start) / done * (planned - done)
        text = f"judged {done} of {planned} ({100 * done // planned} %), {failing} failing, {left:.0f} s left"
        self._line.show(text)

    def close(self) -> None:
        self._line.close()


def compile_first(backend: RemoteBackend, cases: Sequence[Case], write: Callable[[str], None]) -> None:
    """Have a backend compile what the cases need, on all cores, and say what it compiles."""
    line = _Line(write)
    start, count = time.monotonic(), 0

    def say(what: str) -> None:
        nonlocal count
        count += 1
        line.show(f"compiling {backend.name}: {count} kernels, {time.monotonic() - start:.0f} s, {what}")

    wrong = backend.prepare(list(cases), os.cpu_count() or 1, say)
    line.close()
    ended = f", and then: {wrong}" if wrong else ""
    write(f"compiled {backend.name}: {count} kernels in {time.monotonic() - start:.1f} s{ended}\n")
