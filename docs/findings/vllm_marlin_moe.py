"""moe_wna16_marlin_gemm with mul_topk_weights: 129 * (1 + 2^-8) = 129.504 is expected to be rounded once, to
130. The router weight is rounded to bf16 first."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
e, k, n, block, bf16 = 2, 128, 128, 8, torch.bfloat16
NONE, LOCKS, order, which, count = (
    torch.zeros(size, dtype=torch.int32, device="cuda") for size in (0, 4 * 528, e * block, e, 1)
)
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
x = torch.ones((2, k), dtype=bf16, device="cuda")
x[:, 0] = 2
words = torch.full((k // 8, n), -0x66666667, dtype=torch.int32, device="cuda")  # codes of 9, weights of 1
weight = torch.stack([torch.ops._C.gptq_marlin_repack(words, NONE, k, n, 4, False)] * e)
scale = torch.ones((e, 1, n), dtype=bf16, device="cuda")
ids = torch.tensor([[0], [1]], dtype=torch.int32, device="cuda")
torch.ops._moe_C.moe_align_block_size(ids, e, block, order, which, count, None)
router = torch.full((2, 1), 1 + 2.0**-8, device="cuda")
y = torch.ops._moe_C.moe_wna16_marlin_gemm(
    x, None, weight, None, scale, None, None, None, None, None, LOCKS, order, which, count, router, block, 1, True,
    UINT4B8, 2, n, k, True, False, True, False, -1, -1, -1,
)  # fmt: skip
print(
    "marlin moe, mul_topk_weights: 129 * (1 + 2^-8) = 129.504: expected [130.0, 130.0, 130.0, 130.0] "
    f"got {y[0, :4].tolist()}"
)
