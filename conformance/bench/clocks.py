"""How time is taken: a timer for pytest-benchmark whose ticks are CUDA events, and one of the wall clock.

pytest-benchmark subtracts one tick from the next; the difference is the seconds of one call, where a round makes
several.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Tick:
    when: Any  # a CUDA event, or seconds
    calls: int

    def __sub__(self, before: _Tick) -> float:
        if isinstance(self.when, float):
            return (self.when - float(before.when)) / self.calls
        self.when.synchronize()
        return float(before.when.elapsed_time(self.when)) / 1e3 / self.calls


class Clock:
    """calls: of a round. It is as pytest-benchmark wants its timers: called without arguments, with a name."""

    def __init__(self, device: str) -> None:
        self.calls = 1
        self._cuda = device.startswith("cuda")
        self.__name__ = "cuda_events" if self._cuda else "wall_clock"

    def __call__(self) -> _Tick:
        if not self._cuda:
            return _Tick(time.perf_counter(), self.calls)
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _Tick(event, self.calls)

    def rounds(self, run: Callable[[], Any], rounds: int) -> list[float]:
        """Seconds a call, of so many rounds."""
        found = []
        for _ in range(rounds):
            start = self()
            run()
            found.append(self() - start)
        return found

    def median(self, run: Callable[[], Any], rounds: int) -> float:
        """Of so many rounds, after one that does not count."""
        run()
        return statistics.median(self.rounds(run, rounds))


def spread(seconds: Sequence[float]) -> float:
    """What timing the same thing twice differs by, as a fraction: the medians of the first and the second half."""
    half = len(seconds) // 2
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    return abs(first - second) / min(first, second)


def do_bench(run: Callable[[], Any]) -> float:
    """Seconds of `run` as Triton's benchmark takes them: each time by itself, the cache overwritten before it."""
    from triton import testing

    return float(testing.do_bench(run, return_mode="median")) / 1e3


def gpu_state() -> dict[str, str]:
    """Clocks, temperature and power of torch's GPU now, as the driver's own tool says, or of the first one where torch
    does not tell which it is; empty without one."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    fields = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    for which in (f"GPU-{uuid}", "0"):
        command = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            continue
        return dict(zip(fields, (value.strip() for value in done.stdout.split(",")), strict=False))
    return {}
