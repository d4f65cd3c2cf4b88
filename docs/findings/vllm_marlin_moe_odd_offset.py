"""moe_wna16_marlin_gemm of an x that begins at an odd element of its memory: an answer or a refusal is expected.
Alignment is not asked for, and the context is lost."""

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
router = torch.ones((2, 1), device="cuda")
flat = torch.ones(2 * k + 1, dtype=bf16, device="cuda")
flat[1:] = x.flatten()
try:
    y = torch.ops._moe_C.moe_wna16_marlin_gemm(
        flat[1:].view(2, k), None, weight, None, scale, None, None, None, None, None, LOCKS, order, which, count,
        router, block, 1, True, UINT4B8, 2, n, k, True, False, True, False, -1, -1, -1,
    )  # fmt: skip
    torch.cuda.synchronize()
    got = y[0, :4].tolist()
except Exception as error:
    got = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
print(f"marlin moe, x at an odd offset: expected [129.0, 129.0, 129.0, 129.0] or a refusal got {got}")
