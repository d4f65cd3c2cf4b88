"""What the device can do, measured in the same run, and the least that a workload asks of it.

A floor is the larger of two times: its bytes at the bandwidth of a copy, each tensor read or written once, and its
operations at the rate of the largest matrix product of the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from conformance.bench.clocks import Clock
from conformance.bench.rotation import copies

_SIDE = 8192
_COPIED = 1 << 30
_ROUNDS = 10


@dataclass
class Limits:
    """bandwidth: bytes a second, read and written. rates: operations a second, by kind of activation; a kind that the
    device has no matrix product for is absent."""

    device: str
    bandwidth: float
    rates: dict[str, float]
    _plain: dict[tuple[int, int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, device: str) -> Limits:
        return cls(device, _copy(device), _rates(device))

    def floor(self, moved: int, operations: int, kind: str) -> float:
        """Seconds. The rate of a kind without one is the fastest there is."""
        rate = self.rates.get(kind, max(self.rates.values()))
        return max(moved / self.bandwidth, operations / rate)

    def plain(self, m: int, n: int, k: int) -> float:
        """Seconds of a bf16 product of the same sizes on memory that no cache holds."""
        import torch

        if (m, n, k) not in self._plain:
            count = copies(2 * n * k, self.device)
            x = _normal(self.device, m, k)
            weights = [_normal(self.device, n, k) for _ in range(count)]

            def run() -> None:
                for weight in weights:
                    torch.mm(x, weight.T)

            self._plain[m, n, k] = _median(self.device, run, count)
        return self._plain[m, n, k]

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


def _normal(device: str, *shape: int) -> Any:
    """bf16. Not from torch's own generator, which no longer answers after a capture that failed."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)


def _median(device: str, run: Callable[[], Any], calls: int) -> float:
    """Seconds a call. On a GPU a graph is replayed, as what is compared with it."""
    clock = Clock(device)
    clock.calls = calls
    if device.startswith("cuda"):
        import torch

        run()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    return clock.median(run, _ROUNDS)


def _copy(device: str) -> float:
    import torch

    size = _COPIED if device.startswith("cuda") else _COPIED >> 3
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(device, lambda: target.copy_(source), 1)


def _rates(device: str) -> dict[str, float]:
    import torch

    cuda = device.startswith("cuda")
    side = _SIDE if cuda else _SIDE >> 3
    half = _normal(device, side, side)
    one = torch.ones((), device=device)

    def scaled() -> None:
        torch._scaled_mm(fp8, fp8.T, one, one, out_dtype=torch.bfloat16)

    products: dict[str, Callable[[], Any]] = {"a16": lambda: torch.mm(half, half.T)}
    if cuda:
        int8, fp8 = half.to(torch.int8), half.to(torch.float8_e4m3fn)
        products |= {"int8": lambda: torch._int_mm(int8, int8.T), "fp8": scaled}
    found = {}
    for kind, product in products.items():
        try:
            found[kind] = 2 * side**3 / _median(device, product, 1)
        except (RuntimeError, NotImplementedError):
            continue  # an older GPU has no such product
    return found
