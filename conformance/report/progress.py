"""Progress of a long run: one line that is rewritten on a terminal, a line every ten seconds elsewhere.

What compiles is shown like what is judged.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
    """Of judging. known: how many verdicts there were before anybody was asked."""

    def __init__(self, write: Callable[[str], None], known: int = 0) -> None:
        self._line = _Line(write)
        self._start = time.monotonic()
        self._known = known

    def show(self, ledger: Ledger) -> None:
        if not self._line.due():
            return
        now = time.monotonic()
        done, planned = len(ledger.verdicts), max(len(ledger.planned), 1)
        failing = sum(v.fails for v in ledger.verdicts.values())
        left = (now - self._start) / max(done - self._known, 1) * (planned - done)
        text = f"judged {done} of {planned} ({100 * done // planned} %), {failing} failing, {left:.0f} s left"
        self._line.show(text)

    def close(self) -> None:
        self._line.close()


def compile_first(
    backends: Sequence[RemoteBackend], cases: Sequence[Case], write: Callable[[str], None]
) -> None:
    """Have backends compile what the cases need, on all cores, and say what they compile.

    All at once: while one starts its compilers, others use the cores.
    """
    if not backends:
        return
    line, lock = _Line(write), threading.Lock()
    start = time.monotonic()
    counts = dict.fromkeys((backend.name for backend in backends), 0)

    def say(name: str, what: str) -> None:
        with lock:
            counts[name] += 1
            seconds = time.monotonic() - start
            line.show(f"compiling {name}: {counts[name]} kernels, {seconds:.0f} s, {what}")

    def compile_all(backend: RemoteBackend) -> None:
        wrong = backend.prepare(list(cases), os.cpu_count() or 1, partial(say, backend.name))
        ended = f", and then: {wrong}" if wrong else ""
        with lock:
            line.close()
            seconds = time.monotonic() - start
            write(f"compiled {backend.name}: {counts[backend.name]} kernels in {seconds:.1f} s{ended}\n")

    pool = ThreadPoolExecutor(len(backends))
    try:
        list(pool.map(compile_all, backends))
    finally:
        pool.shutdown(wait=False)  # an interrupt does not wait for hosts; whoever catches it ends them
