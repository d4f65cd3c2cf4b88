"""Progress of a long run: one line that is rewritten on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from conformance.ledger import Ledger

_PERIOD_TERMINAL, _PERIOD_FILE = 0.2, 10.0


class Progress:
    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._terminal = sys.stdout.isatty()
        self._period = _PERIOD_TERMINAL if self._terminal else _PERIOD_FILE
        self._start = self._shown = time.monotonic()
        self._open = False

    def show(self, ledger: Ledger) -> None:
        now = time.monotonic()
        if now - self._shown < self._period:
            return
        self._shown = now
        done, planned = len(ledger.verdicts), max(len(ledger.planned), 1)
        failing = sum(v.fails for v in ledger.verdicts.values())
        left = (now - self._start) / done * (planned - done)
        text = f"judged {done} of {planned} ({100 * done // planned} %), {failing} failing, {left:.0f} s left"
        self._write(f"\r{text:<70}" if self._terminal else f"\n{text}")
        self._open = True

    def close(self) -> None:
        if self._open:
            self._write("\r" + " " * 70 + "\r" if self._terminal else "\n")
            self._open = False
