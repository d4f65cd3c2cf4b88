"""marlin_gemm, 4 bits, fp16, one scale a channel: 7 * 1.0 * 128 * 128 * 2^-10 = 112 is expected. The sum is rounded to
16 bits before it meets the scale."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
n, k, fp16 = 128, 128, torch.float16
NONE, LOCKS = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (0, 528))
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
words = torch.full((k // 8, n), -1, dtype=torch.int32, device="cuda")  # codes of 15, weights of 7
weight = torch.ops._C.gptq_marlin_repack(words, NONE, k, n, 4, False)
x = torch.full((1, k), 128.0, dtype=fp16, device="cuda")
scale = torch.full((1, n), 2.0**-10, dtype=fp16, device="cuda")
y = torch.ops._C.marlin_gemm(
    x, None, weight, None, scale, None, None, None, None, None, LOCKS, UINT4B8, 1, n, k, True, False, True, False,
)  # fmt: skip
print(f"marlin fp16, a scale of 2^-10 a channel: expected [112.0, 112.0] got {y[0, :2].tolist()}")
