"""moe_wna16_gemm: 256 + 127 in bf16, zero points of an expert that begin inside a word, and x as a slice of
columns: 384, zeros and no difference are expected. Products are summed in bf16, words floored, strides not
asked for."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
bf16 = torch.bfloat16


def experts(x, u, zeros=None):
    """x (M, 128), row i to expert i % E; u (E, N, 128), codes of 4 bits; zeros (E, N, 1), or None for 8."""
    e, n, _ = u.shape
    pairs = (u[..., 0::2] | u[..., 1::2] << 4).to(torch.uint8).contiguous()
    zeros = None if zeros is None else (zeros[:, 0::2] | zeros[:, 1::2] << 4).to(torch.uint8).contiguous()
    order, which, count = (
        torch.empty(size, dtype=torch.int32, device="cuda") for size in (16 * len(x), len(x), 1)
    )
    ids = torch.tensor([[i % e] for i in range(len(x))], dtype=torch.int32, device="cuda")
    torch.ops._moe_C.moe_align_block_size(ids, e, 16, order, which, count, None)
    y = torch.empty((len(x), n), dtype=bf16, device="cuda")
    scale = torch.ones((e, n, 1), dtype=bf16, device="cuda")
    torch.ops._moe_C.moe_wna16_gemm(x, y, pairs, scale, zeros, None, order, which, count, 1, 16, 128, 128, 4)
    return y


x = torch.ones((1, 128), dtype=bf16, device="cuda")
x[0, 0] = 256
y = experts(x, torch.full((1, 16, 128), 9, device="cuda"))
print(f"moe_wna16 256 + 127 in bf16: expected [384.0, 384.0, 384.0, 384.0] got {y[0, :4].tolist()}")
rows = (torch.arange(68, device="cuda") % 16)[None, :, None]  # codes and zero points: every weight is 0
y = experts(torch.ones((2, 128), dtype=bf16, device="cuda"), rows.expand(2, 68, 128), rows.expand(2, 68, 1))
got = [int((row != 0).sum()) for row in y]
print(f"moe_wna16 68 rows, zero points: wrong numbers of expert 0, of expert 1: expected [0, 0] got {got}")
x = torch.randn((2, 128), generator=torch.Generator().manual_seed(1)).to("cuda", bf16)
wide = torch.full((2, 144), float("nan"), dtype=bf16, device="cuda")
wide[:, 8:-8] = x
u = torch.full((2, 16, 128), 9, device="cuda")
got = float((experts(wide[:, 8:-8], u) - experts(x, u)).abs().max())
print(f"moe_wna16 x as a slice of columns: difference from the same rows: expected 0.0 got {got}")
