"""The oracle's speed next to compressed-tensors' own, on one thread.

    python tools/bench_oracle.py [--out FILE.json] [--size 4096] [--repeats 7]

Results are compared bit by bit first; then both sides take turns, so that a slow moment of the machine
hits both. A ratio is their best time over ours. Exit code 1 if a ratio or a peak of memory misses its limit.
"""

# ruff: noqa: E402 (numpy counts its threads when it is imported)

from __future__ import annotations

import os

for _pool in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
    os.environ[f"{_pool}_NUM_THREADS"] = "1"

import argparse
import json
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize
from rich.console import Console
from rich.table import Table

from reference.formats import WeightFormat
from reference.packing import pack, unpack
from reference.weights import QuantizedWeight, dequantize, scale_shape

LIMITS = {"pack": 2.0, "unpack": 2.0, "dequantize": 1.0}
MEMORY_LIMIT = 3.0  # peak beyond the output, in sizes of the int8 codes
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Contest:
    """One operation on one matrix: two functions without arguments that return the same bits."""

    operation: str
    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """Times in milliseconds; memory: the peak beyond the output, in sizes of the int8 codes."""

    operation: str
    name: str
    ours_best_ms: float
    ours_median_ms: float
    theirs_best_ms: float
    theirs_median_ms: float
    ratio: float
    memory: float

    @property
    def holds(self) -> bool:
        return self.ratio >= LIMITS[self.operation] and self.memory <= MEMORY_LIMIT


def contests(size: int) -> Iterator[Contest]:
    rng = np.random.default_rng(0)
    for bits in range(1, 9):
        codes = random_codes(rng, bits, (size, size))
        words = pack(codes, bits)
        tensor, packed = torch.from_numpy(codes), torch.from_numpy(words)
        yield Contest(
            "pack",
            f"w{bits}",
            lambda c=codes, b=bits: pack(c, b),
            lambda t=tensor, b=bits: pack_to_int32(t, b),
        )
        yield Contest(
            "unpack",
            f"w{bits}",
            lambda w=words, b=bits: unpack(w, b, size),
            lambda p=packed, b=bits: unpack_from_int32(p, b, torch.Size([size, size])),
        )
    for dtype, kind in DTYPES.items():
        for group_size in (-1, 32, 128):
            for symmetric in (True, False):
                yield dequantize_contest(rng, WeightFormat.of(4, group_size, symmetric), size, dtype, kind)


def dequantize_contest(
    rng: np.random.Generator, fmt: WeightFormat, size: int, dtype: str, kind: Any
) -> Contest:
    shape = scale_shape(fmt, size, size)
    scale = (np.exp2(rng.normal(0, 1, shape)) * 0.01).astype(kind)
    zeros = None if fmt.symmetric else random_codes(rng, fmt.bits, shape)
    weight = QuantizedWeight(fmt, random_codes(rng, fmt.bits, (size, size)), scale, zeros)
    args = QuantizationArgs(**fmt.to_quantization_args())
    tensors = [None if a is None else to_torch(a) for a in (weight.codes, scale, zeros)]
    return Contest(
        "dequantize",
        f"{fmt.name} {dtype}",
        lambda: dequantize(weight),
        lambda: their_dequantize(*tensors, args),
    )


def random_codes(rng: np.random.Generator, bits: int, shape: tuple[int, ...]) -> Any:
    return rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), shape, dtype=np.int8)


def to_torch(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def judge(contest: Contest, codes_bytes: int, repeats: int) -> Result:
    ours, theirs = contest.ours(), contest.theirs()
    mine = to_torch(ours)
    if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
        raise SystemExit(f"{contest.operation} {contest.name}: the results differ")
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repeats):
        for side, call in (("ours", contest.ours), ("theirs", contest.theirs)):
            start = time.perf_counter()
            call()
            times[side].append((time.perf_counter() - start) * 1e3)
    best = {side: min(values) for side, values in times.items()}
    median = {side: statistics.median(values) for side, values in times.items()}
    return Result(
        contest.operation,
        contest.name,
        *(round(figure, 3) for side in ("ours", "theirs") for figure in (best[side], median[side])),
        ratio=round(best["theirs"] / best["ours"], 2),
        memory=round(peak_beyond_output(contest.ours) / codes_bytes, 2),
    )


def peak_beyond_output(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        output = call()
        return int(tracemalloc.get_traced_memory()[1] - output.nbytes)
    finally:
        tracemalloc.stop()


def environment() -> dict[str, str]:
    return {
        "processor": processor(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "ml_dtypes", "torch", "compressed-tensors")},
    }


def processor() -> str:
    """The processor's model name, and nothing else about the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(results: list[Result], facts: dict[str, str]) -> None:
    table = Table(
        title="their best time / ours, one thread", caption=", ".join(f"{k} {v}" for k, v in facts.items())
    )
    for column in ("operation", "", "ours ms", "theirs ms", "ratio", "median ratio", "limit", "memory", ""):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        table.add_row(
            result.operation,
            result.name,
            f"{result.ours_best_ms:.1f}",
            f"{result.theirs_best_ms:.1f}",
            f"{result.ratio:.2f}",
            f"{result.theirs_median_ms / result.ours_median_ms:.2f}",
            f"{LIMITS[result.operation]:.0f}",
            f"{result.memory:.2f}",
            "" if result.holds else "MISSED",
        )
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--repeats", type=int, default=7, help="times each side takes its turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = [judge(contest, given.size**2, given.repeats) for contest in contests(given.size)]
    facts = environment()
    show(results, facts)
    missed = [f"{r.operation} {r.name}" for r in results if not r.holds]
    if given.out:
        document = {
            "command": ["python", "tools/bench_oracle.py", *sys.argv[1:]],
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "environment": facts,
            "matrix": [given.size, given.size],
            "threads": 1,
            "repeats": given.repeats,
            "limits": {**LIMITS, "memory": MEMORY_LIMIT},
            "missed": missed,
            "results": [asdict(result) for result in results],
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"missed: {', '.join(missed)}" if missed else "every limit holds")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
