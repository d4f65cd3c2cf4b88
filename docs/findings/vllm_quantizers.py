"""Quantizers of activations: codes times scale are expected within half a step of the input, and NaN to
remain NaN."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
C, F8, I8 = torch.ops._C, torch.float8_e4m3fn, torch.int8


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")


codes, scale, azp = empty(1, 16, dtype=I8), empty(1, 1), empty(1, 1, dtype=torch.int32)
C.dynamic_scaled_int8_quant(codes, torch.ones((1, 16), dtype=torch.bfloat16, device="cuda"), scale, azp)
got = ((codes.double() - azp.double()) * scale.double())[0, :2].tolist()
print(f"dynamic int8 with zero points, a constant row of 1, dequantized: expected [1.0, 1.0] got {got}")

x = torch.full((1, 128), 0.9, device="cuda").half()
x[0, 0], x[0, 2] = 127, -0.9
codes = empty(1, 128, dtype=I8)
C.per_token_group_quant_int8(x, codes, scale, 128, 1e-10, -128.0, 127.0)
got = codes[0, :3].tolist()
print(f"per_token_group_quant_int8 of 127, 0.9, -0.9 with scale 1: expected [127, 1, -1] got {got}")

codes, one = empty(2, 128, dtype=F8), empty(1)
C.dynamic_scaled_fp8_quant(codes, torch.zeros((2, 128), dtype=torch.bfloat16, device="cuda"), one)
got = codes.float()[0, :2].tolist(), one.tolist()
print(f"dynamic_scaled_fp8_quant of zeros: codes, scale: expected ([0.0, 0.0], any) got {got}")

x = torch.ones((1, 128), dtype=torch.bfloat16, device="cuda")
x[0, 3] = float("nan")
for kind, dtype in (("int8", I8), ("fp8", F8)):
    codes = empty(1, 128, dtype=dtype)
    if kind == "int8":
        C.dynamic_scaled_int8_quant(codes, x, scale, None)
    else:
        C.dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)
    got = [round(v, 5) for v in (codes.float() * scale)[0, :5].tolist()]
    print(f"dynamic {kind} of a token with NaN, dequantized: expected NaN in [3] got {got}")
