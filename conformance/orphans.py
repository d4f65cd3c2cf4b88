"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any


def end_with_parent() -> None:
    """For the start of a worker of a pool: a parent that is killed tells its workers nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with([parent.sentinel])


def end_with(signs: Sequence[Any], seconds: float = 0.0) -> None:
    """End this process, and those that it has started, so many seconds after one of the signs can be read."""

    def watch() -> None:
        wait(signs)
        time.sleep(seconds)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="quantcts-orphan").start()
