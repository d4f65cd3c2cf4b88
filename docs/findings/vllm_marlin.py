"""marlin_gemm, int8 activations, two groups of which only the second has x: 128 * 7 times its scale is
expected. Scales are handed over as vLLM does, as integers up to 4096 parts of the layer's largest."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
n, k, bf16 = 128, 256, torch.bfloat16
NONE, LOCKS = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (0, 528))
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
words = torch.full((k // 8, n), -1, dtype=torch.int32, device="cuda")  # codes of 15, weights of 7
weight = torch.ops._C.gptq_marlin_repack(words, NONE, k, n, 4, True)
x = torch.tensor([[0.0] * 128 + [1.0] * 128], dtype=bf16, device="cuda")
codes = torch.empty((1, k), dtype=torch.int8, device="cuda")
a_scale = torch.empty((1, 1), dtype=torch.float32, device="cuda")
torch.ops._C.dynamic_scaled_int8_quant(codes, x, a_scale, None)
for name, second, expected in (
    ("a group's scale 2^-14 of the largest", 2.0**-14, 0.05469),
    ("a group's scale 1/3000 of the largest", 1 / 3000, 0.29883),
    ("a negative scale", -1.0, -896.0),
):
    scale = torch.tensor([[1.0], [second]], dtype=bf16, device="cuda").expand(2, n).contiguous()
    parts = (scale / scale.max() * 4096).round().to(torch.int16).view(bf16)
    y = torch.ops._C.marlin_gemm(
        codes, None, weight, None, parts, a_scale * scale.max().float() / 4096, None, None, None, None, LOCKS,
        UINT4B8, 1, n, k, True, False, True, False,
    )  # fmt: skip
    print(f"marlin int8, {name}: expected {[expected] * 4} got {[round(v, 5) for v in y[0, :4].tolist()]}")
