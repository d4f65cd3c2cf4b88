"""What a check asks of the machine that runs it."""

from __future__ import annotations

import shutil

from conformance.backend import Backend, device_of
from conformance.cases import Case

ON_CUDA = ("stream", "graph", "canary", "device", "overflow")
# Of an output of 2^31 numbers, of activations that some libraries copy, and of a weight that some make a matrix of
_BYTES_A_WEIGHT, _BYTES_AN_OUTPUT, _BYTES_AN_ACTIVATION = 24, 4, 6


def lacking(case: Case, backend: Backend) -> str | None:
    """Why the case's check cannot be made of this backend here, or None."""
    check = case.recipe
    if check not in ON_CUDA:
        return None
    device = device_of(backend)
    if not device.startswith("cuda"):
        return f"it is asked of backends on CUDA devices; this one is on {device}"
    if check == "canary" and shutil.which("g++") is None:
        return "there is no g++ to build the guarding allocator with"
    if check == "device":
        return _other_device()
    if check == "overflow":
        weights, outputs, activations = case.n * case.k, case.m * case.n, case.m * case.k
        needed = weights * _BYTES_A_WEIGHT + outputs * _BYTES_AN_OUTPUT + activations * _BYTES_AN_ACTIVATION
        return _room(needed)
    return None


def _other_device() -> str | None:
    import torch

    count = int(torch.cuda.device_count())
    return f"a second device needs two GPUs; this process sees {count}" if count < 2 else None


def _room(needed: int) -> str | None:
    """Whether so many bytes of the GPU are free; a process that has no business on it does not look."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return f"it takes {needed >> 30} GiB of GPU memory; {free >> 30} are free" if free < needed else None
