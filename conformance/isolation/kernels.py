"""Which GPU kernels a call launched, by torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any


def start_profiler() -> None:
    """Spend what the first `launched` would take, while nobody waits for an answer."""
    _profiler_works()


def launched(call: Callable[[], Any]) -> tuple[str, ...] | None:
    """The names of the kernels that a call launches, each once, in order; None where the profiler does not say, or the
    call, which has been made before, ends with an error now.

    The call is made again for this, so that what was timed and judged ran undisturbed.
    """
    return _recorded(call) if _profiler_works() else None


@cache
def _profiler_works() -> bool:
    """Whether a kernel that is launched is seen: without CUPTI there is a warning and an empty record. CUPTI takes
    seconds for its start, whatever the call."""
    import torch

    return bool(_recorded(lambda: torch.ones(1, device="cuda").add_(1)))


def _recorded(call: Callable[[], Any]) -> tuple[str, ...] | None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    # The profiler would take CUPTI down after each use and set it up for the next, at ten times the cost of the call.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    try:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=False) as record:
            call()
            torch.cuda.synchronize()
        events = record.profiler.kineto_results.events()
    except Exception:  # the profiler's, where another one has CUPTI, or the call's
        return None
    names = (event.name() for event in events if event.device_type() == torch.autograd.DeviceType.CUDA)
    own = (name.removeprefix("void ") for name in names if not name.startswith(("Memcpy", "Memset")))
    return tuple(dict.fromkeys(own))
