"""cutlass_w4a8_mm of no rows: an empty result is expected. A TMA descriptor of no rows cannot be made."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
C, F8 = torch.ops._C, torch.float8_e4m3fn
b = C.cutlass_encode_and_reorder_int4b(torch.zeros((128, 16), dtype=torch.int32, device="cuda").T)
s = C.cutlass_pack_scale_fp8(torch.zeros((1, 128), device="cuda").to(F8))
x, by_row, by_token = (torch.zeros(shape, device="cuda") for shape in ((0, 128), (128, 1), (0, 1)))
try:
    C.cutlass_w4a8_mm(x.to(F8), b, s, 128, by_row, by_token, None, None)
    got = "none"
except Exception as error:
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
print(f"no rows, cutlass_w4a8_mm: expected none got {got}")
