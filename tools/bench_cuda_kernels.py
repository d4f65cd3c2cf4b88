"""How near our own weight-only kernels come to the bandwidth of the GPU.

A 4-bit layer of 8192 x 8192, groups of 128, M = 1 to 16. Bytes that must move: the packed weights, scales, zero points,
x and y, each once. The limit is what a copy inside the device's memory reaches in the same run, counting bytes read
and bytes written. Each layer is one of several whose weights together are larger than the cache; a CUDA graph of
several calls to each, one after the other, is replayed, so that launches cost nothing, the graph's own next to nothing,
and every weight comes from memory. What is timed is first compared with float64 on sampled outputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from conformance.backend import Checkpoint
from conformance.backends.torch_weights import weight_of
from conformance.report.document import environment
from reference.formats import WeightFormat

SIZE, GROUP = 8192, 128
LAYERS = 8  # 8 x 34 MB, beside a cache of some 60 MB
ROUNDS = 4  # a graph's own launch takes some 4 us: a fiftieth of so many calls
REPEATS = 20
TOKENS = (1, 2, 4, 8, 16)
SAMPLED = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, help="write the figures there (JSON)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_cuda_kernels: torch finds no CUDA device")
    from conformance.backends.cuda_kernels import backend as make

    backend = make()
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s, bytes read and written")
    results = []
    for symmetric in (True, False):
        for dtype in (torch.bfloat16, torch.float16):
            checkpoints = [made(symmetric, dtype, seed) for seed in range(LAYERS)]
            layers = [backend.load_linear(checkpoint) for checkpoint in checkpoints]
            for tokens in TOKENS:
                x = torch.randn(tokens, SIZE, device="cuda", dtype=dtype)
                error = relative_error(layers[0](x), checkpoints[0], x)
                seconds = time_of(layers, x)
                moved = sum(t.nbytes for n, t in checkpoints[0].tensors.items() if n != "weight_shape")
                moved += 2 * x.nbytes
                results.append(
                    {
                        "tokens": tokens, "symmetric": symmetric, "dtype": str(dtype).removeprefix("torch."),
                        "microseconds": round(seconds * 1e6, 2), "bytes": moved,
                        "fraction_of_copy": round(moved / seconds / copy, 3), "relative_error": float(f"{error:.2g}"),
                    }
                )  # fmt: skip
                print(json.dumps(results[-1]))
    if arguments.report:
        document = {"environment": environment([backend]), "copy_bytes_per_second": copy, "results": results}
        arguments.report.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    worst = min(r["fraction_of_copy"] for r in results)
    print(f"lowest fraction of the copy's bandwidth: {worst}")


def made(symmetric: bool, dtype: torch.dtype, seed: int, n: int = SIZE, k: int = SIZE) -> Checkpoint:
    """A layer of random codes; scales such that outputs are of the order of one."""
    rng = torch.Generator("cuda").manual_seed(seed)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=rng, device="cuda").to(torch.int32)

    scale = torch.rand(n, k // GROUP, generator=rng, device="cuda") * 0.002 + 0.001
    tensors = {
        "weight_packed": words(n, k // 8),
        "weight_scale": scale.to(dtype),
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(n // 8, k // GROUP)
    args = WeightFormat.of(4, GROUP, symmetric).to_quantization_args()
    return Checkpoint(tensors, args, None, "bf16" if dtype is torch.bfloat16 else "fp16")


def relative_error(y: torch.Tensor, checkpoint: Checkpoint, x: torch.Tensor) -> float:
    """Of sampled outputs against float64. Raises SystemExit for a wrong kernel: it gets no number."""
    weight = weight_of(checkpoint)
    rows = torch.randperm(SIZE, device="cuda")[:SAMPLED]
    codes = weight.codes[rows].double()
    if weight.zero_point is not None:
        codes -= weight.zero_point[rows].double().repeat_interleave(GROUP, dim=1)
    right = x.double() @ (codes * weight.scale[rows].double().repeat_interleave(GROUP, dim=1)).T
    error = float((y[:, rows].double() - right).norm() / right.norm())
    if not error < 0.004:
        sys.exit(f"bench_cuda_kernels: the kernel is wrong by {error:.3g} in relative norm")
    return error


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = [_event_seconds(lambda: target.copy_(source)) for _ in range(REPEATS)]
    return 2 * source.nbytes / statistics.median(times)


def time_of(layers: list, x: torch.Tensor) -> float:
    """Median seconds of one call."""
    for layer in layers:
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers * ROUNDS:
            layer(x)
    graph.replay()
    return statistics.median(_event_seconds(graph.replay) for _ in range(REPEATS)) / (len(layers) * ROUNDS)


def _event_seconds(call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    main()
