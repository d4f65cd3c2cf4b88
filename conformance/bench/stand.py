"""The stand on which one workload of one backend is timed: right before, timed, right after, and not too good."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.arrays import Array, WrongAnswer, to_backend
from conformance.backend import Backend, device_of
from conformance.bench.clocks import Clock, do_bench, gpu_state, spread
from conformance.bench.limits import Limits
from conformance.bench.rotation import Rotation, copies, kept_by_the_cache
from conformance.bench.subjects import Subject
from conformance.bench.verify import allowed_apart
from conformance.subject import as_in_production, describe

# Seconds of timing, and at least so many rounds
LONG, LEAST, MOST = 0.3, 10, 400
# A call that takes longer is not timed: it is made forty times, on a CPU that is minutes.
SLOW = 2.0
# Faster than the floor by more than this is no record: something was not done
IMPOSSIBLE = 0.97


class Untimed(Exception):
    """There is no number, and why: `declines`, `slow`, `wrong`, `crashes`, `invalid`."""

    def __init__(self, state: str, why: str) -> None:
        super().__init__(f"{state}: {why}")
        self.state, self.why = state, why


@dataclass
class Loaded:
    """The copies of a layer that a backend has loaded, kept for the next number of tokens."""

    layer: str = ""
    backend: str = ""
    functions: list[Callable[..., Any]] = field(default_factory=list)
    slow: int = 0  # tokens from which on a call takes too long; 0: none did

    def first(self, subject: Subject, backend: Backend) -> Callable[..., Any]:
        key = subject.workload.layer, backend.name
        if key != (self.layer, self.backend):
            self.functions.clear()  # before the next are there
            self.layer, self.backend = key
            self.slow = 0
        if not self.functions:
            self.functions.append(subject.load(backend))
        return self.functions[0]

    def of(self, subject: Subject, backend: Backend, count: int) -> list[Callable[..., Any]]:
        self.first(subject, backend)
        del self.functions[count:]
        while len(self.functions) < count:
            self.functions.append(subject.load(backend))
        return list(self.functions)


class Stand:
    """limits: by device, measured when they are first asked for. do_bench: whether Triton's benchmark takes the time
    of the same rounds as well, on a GPU."""

    def __init__(self, *, do_bench: bool = False) -> None:
        self.do_bench = do_bench
        self.limits: dict[str, Limits] = {}
        self._loaded = Loaded()

    def limits_of(self, device: str) -> Limits:
        if device not in self.limits:
            self.limits[device] = Limits.of(device)
        return self.limits[device]

    def time(self, subject: Subject, backend: Backend, benchmark: Any, clock: Clock) -> None:
        """Let pytest-benchmark time it, and note beside its figures what they mean. Raises Untimed."""
        device = device_of(backend)
        limits = self.limits_of(device)
        floor = limits.floor(subject.moved, subject.operations, subject.workload.case.activation.kind)
        try:
            try:
                info, rotation = self._timed(subject, backend, benchmark, clock, device)
            except Untimed:
                raise
            except Exception as error:
                raise Untimed("crashes", describe(error)) from error
            seconds = benchmark.stats.stats.data
            median = statistics.median(seconds)
            plain = subject.plain(limits)
            benchmark.extra_info.update(
                info,
                workload=subject.workload.id,
                operation=subject.workload.case.operation,
                layer=subject.workload.layer,
                tokens=subject.workload.case.m,
                backend=backend.name,
                device=device,
                median_seconds=median,
                noise=max(spread(seconds), 0.0),
                bytes=subject.moved,
                operations=subject.operations,
                floor_seconds=floor,
                fraction_of_floor=floor / median,
                times_bf16=median / plain if plain else None,
                copies=clock.calls,
                graph=not rotation.ungraphed,
                ungraphed=rotation.ungraphed,
            )
            if median < floor * IMPOSSIBLE:
                why = f"{median * 1e6:.2f} µs is less than the {floor * 1e6:.2f} µs that the device needs"
                raise Untimed("invalid", f"{why}: a cache that was not cold, or work that was not done")
        except BaseException:
            benchmark.has_error = True  # no number, whatever was timed
            raise

    def _timed(
        self, subject: Subject, backend: Backend, benchmark: Any, clock: Clock, device: str
    ) -> tuple[dict[str, Any], Rotation]:
        """Right before, timed, right after; what the device was like meanwhile."""
        cuda = device.startswith("cuda")
        with as_in_production():
            rotation = self._rotation(subject, backend, device)
            self._verify(subject, backend, rotation, 0, "before it is timed")
            clock.calls = len(rotation.outputs)
            once = max(clock.median(rotation.run, 3) * clock.calls, 1e-9)
            rounds = min(max(int(LONG / once), LEAST), MOST)
            info: dict[str, Any] = {"gpu_before": gpu_state() if cuda else {}}
            benchmark.pedantic(rotation.run, setup=rotation.clear, rounds=rounds, warmup_rounds=3)
            info["gpu_after"] = gpu_state() if cuda else {}
            if self.do_bench and cuda:
                info["do_bench_seconds"] = do_bench(rotation.run) / clock.calls
            rotation.refresh(subject.inputs(1))
            rotation.run()
            self._verify(subject, backend, rotation, 1, "on other inputs, after it was timed")
        return info, rotation

    def _rotation(self, subject: Subject, backend: Backend, device: str) -> Rotation:
        inputs = subject.inputs(0)
        seconds = self._once(subject, backend, inputs, device)
        count = copies(subject.moved, subject.held, seconds, device)
        overwritten = kept_by_the_cache(count * subject.moved, device)
        return Rotation(backend, self._loaded.of(subject, backend, count), inputs, overwritten)

    def _once(self, subject: Subject, backend: Backend, inputs: Sequence[Array], device: str) -> float:
        """Seconds of one call that the host launches: a graph of it takes no more."""
        function = self._loaded.first(subject, backend)
        tokens = subject.workload.case.m
        if 0 < self._loaded.slow <= tokens:
            raise Untimed("slow", f"with {self._loaded.slow} tokens a call took more than {SLOW:.0f} s")
        own = [to_backend(array, backend) for array in inputs]
        clock = Clock(device)
        first = clock.rounds(lambda: function(*own), 1)[0]  # compiles and tunes, on a GPU
        seconds = clock.rounds(lambda: function(*own), 1)[0] if device.startswith("cuda") else first
        if seconds > SLOW:
            self._loaded.slow = tokens
            raise Untimed("slow", f"a call takes {seconds:.1f} s, more than the {SLOW:.0f} of the stand")
        return seconds

    def _verify(self, subject: Subject, backend: Backend, rotation: Rotation, seed: int, when: str) -> None:
        """The first answer by the oracle, the others by the first: they are of the same values."""
        try:
            why = subject.wrong(backend, seed, rotation.outputs[0]) or _differing(
                rotation.outputs, allowed_apart(backend)
            )
        except WrongAnswer as error:
            why = str(error)
        if why:
            raise Untimed("wrong", f"{when}: {why}")


def _differing(outputs: list[Any], apart: float) -> str:
    """Which of several equal calls did not give what the first gave, up to the order of a sum."""
    first = [_values(part) for part in _parts(outputs[0])]
    for number, output in enumerate(outputs[1:], 1):
        for right, part in zip(first, _parts(output), strict=True):
            rms = right.square().mean().sqrt()
            off = ((_values(part) - right).abs() / (rms + right.abs()).clamp(min=1e-30)).max()
            if not bool(off <= apart):
                return (
                    f"call {number} of {len(outputs)} equal ones differs from the first, by {float(off):.3g} where "
                    f"another order of the same sums gives {apart:.3g}"
                )
    return ""


def _parts(output: Any) -> list[Any]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _values(part: Any) -> Any:
    """A float32 tensor where the answer lies: answers are large."""
    import torch

    return torch.from_numpy(part.astype(np.float32)) if isinstance(part, np.ndarray) else part.float()
