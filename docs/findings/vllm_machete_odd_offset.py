"""machete_mm of an x that begins at an odd element of its memory: an answer or a refusal is expected. Alignment is
not asked for, and the context is lost."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
UINT4B8, bf16 = 4 << 8 | 8 << 17 | 1 << 50, torch.bfloat16
k, n = 512, 256
words = torch.full((n, k // 8), -0x66666667, dtype=torch.int32, device="cuda").T  # codes of 9, weights of 1
weight = torch.ops._C.machete_prepack_B(words, bf16, UINT4B8, bf16)
scale = torch.ones((k // 128, n), dtype=bf16, device="cuda")


def product(x):
    y = torch.ops._C.machete_mm(x, weight, UINT4B8, None, scale, None, 128, None, None, None)
    torch.cuda.synchronize()
    return float(y[0, 0])


x = torch.ones(33 * k + 1, dtype=bf16, device="cuda")
print(f"machete x at an even offset: expected 512.0 got {product(x[:-1].view(33, k))}")
try:
    got = product(x[1:].view(33, k))
except Exception as error:
    got = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
print(f"machete x at an odd offset: expected 512.0 or a refusal got {got}")
