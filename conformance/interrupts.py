"""Interrupts that are not lost: Python drops the exception of one that falls into a destructor, and a run would go on.

SIGTERM counts as one: whoever ends a run with it, as CI does, gets the report of what was judged.
"""

from __future__ import annotations

import signal
from typing import Any

_came = False


def heed() -> None:
    """Raise KeyboardInterrupt where the signal falls; in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: Any) -> None:
    global _came
    _came = True
    raise KeyboardInterrupt


def raise_lost() -> None:
    """Raise KeyboardInterrupt where a signal came whose own was lost. For places that nothing reaches after one."""
    if _came:
        raise KeyboardInterrupt
