"""What the device can do, measured in the same run, and the least that a workload asks of it.

A floor is the larger of two times: its bytes at the bandwidth of memory, each tensor read or written once, and its
operations at the rate of the fastest matrix product of the kind. Both are upper limits: the fastest of several times,
after the clocks have risen; of products of zeros, for which power does not hold the clocks down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from conformance.bench.clocks import Clock
from conformance.bench.rotation import captured, copies

_SIDES = (4096, 8192)
_COPIED = 1 << 30
_ROUNDS = 10
_WARM_UP = 0.2  # seconds


@dataclass
class Limits:
    """bandwidth: bytes a second, of a copy, read and written, or of a sum, read, whichever is faster. rates: operations
    a second, by kind of activation; a kind that the device has no matrix product for is absent."""

    device: str
    bandwidth: float
    rates: dict[str, float]
    _plain: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, device: str) -> Limits:
        return cls(device, _bandwidth(device), _rates(device))

    def floor(self, moved: int, operations: int, kind: str) -> float:
        """Seconds. The rate of a kind without one is the fastest there is."""
        rate = self.rates.get(kind, max(self.rates.values()))
        return max(moved / self.bandwidth, operations / rate)

    def plain(self, m: int, n: int, k: int, matrices: int = 1) -> float:
        """Seconds of a bf16 product of the same sizes on memory that no cache holds, or of one for each of several
        matrices."""
        import torch

        key = m, n, k, matrices
        if key not in self._plain:
            size = 2 * n * k * matrices
            count = copies(size, size, 0.0, self.device)
            x = _normal(self.device, matrices, m, k)
            weights = [_normal(self.device, matrices, n, k) for _ in range(count)]

            def run() -> None:
                for weight in weights:
                    torch.bmm(x, weight.mT) if matrices > 1 else torch.mm(x[0], weight[0].T)

            self._plain[key] = statistics.median(_times(self.device, _replayed(self.device, run), count))
        return self._plain[key]

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


def _normal(device: str, *shape: int) -> Any:
    """bf16. Not from torch's own generator, which no longer answers after a capture that failed."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)


def _replayed(device: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """On a GPU a graph of it, as what is compared with it."""
    if not device.startswith("cuda"):
        return run
    graph = captured(run)
    return lambda: graph.replay()


def _times(device: str, run: Callable[[], Any], calls: int = 1) -> list[float]:
    """Seconds a call, of several rounds."""
    clock = Clock(device)
    clock.calls = calls
    until = time.monotonic() + (_WARM_UP if device.startswith("cuda") else 0)
    clock.rounds(run, 1)
    while time.monotonic() < until:
        clock.rounds(run, 1)
    return clock.rounds(run, _ROUNDS)


def _bandwidth(device: str) -> float:
    import torch

    size = _COPIED if device.startswith("cuda") else _COPIED >> 3
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    # Not replayed: a copy in a graph is left to the copy engine, which is slower than a kernel.
    copied = 2 * size / min(_times(device, lambda: target.copy_(source)))
    return max(copied, size / min(_times(device, source.sum)))


def _rates(device: str) -> dict[str, float]:
    found: dict[str, float] = {}
    cuda = device.startswith("cuda")
    for side in _SIDES if cuda else (_SIDES[0] >> 2,):
        for kind, product in _products(device, side).items():
            try:
                rate = 2 * side**3 / min(_times(device, product))
            except (RuntimeError, NotImplementedError):
                continue  # an older GPU has no such product
            found[kind] = max(rate, found.get(kind, 0.0))
    # torch's own product of integers is not a fast one everywhere: as many bits of fp8, half as many of a number of 16.
    if "int8" in found:
        found["int8"] = max(found["int8"], found.get("fp8", 0.0), 2 * found["a16"])
    return found


def _products(device: str, side: int) -> dict[str, Callable[[], Any]]:
    """By kind of activation."""
    import torch

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(side, side, device=device, dtype=dtype)

    half = zeros(torch.bfloat16)
    products: dict[str, Callable[[], Any]] = {"a16": lambda: torch.mm(half, half.T)}
    if device.startswith("cuda"):
        int8, fp8 = zeros(torch.int8), zeros(torch.float8_e4m3fn)
        one, fast = torch.ones((), device=device), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        products["int8"] = lambda: torch._int_mm(int8, int8.T)
        products["fp8"] = lambda: torch._scaled_mm(fp8, fp8.T, one, one, **fast)
    return products
