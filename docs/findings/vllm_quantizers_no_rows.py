"""vLLM's quantizers of no rows: empty codes are expected. The launch of an empty grid fails, which the next kernel of
anybody meets."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
C = torch.ops._C
x = torch.zeros((0, 128), dtype=torch.bfloat16, device="cuda")
scales = torch.zeros((0, 1), device="cuda")
int8, fp8 = torch.empty((0, 128), dtype=torch.int8, device="cuda"), torch.float8_e4m3fn


def after(call):
    """What the next kernel says."""
    call()
    try:
        torch.ones(1, device="cuda").add_(1).item()
        return "none"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


got = after(lambda: C.dynamic_scaled_int8_quant(int8, x, scales, None))
print(f"dynamic_scaled_int8_quant of no rows, error of the next kernel: expected none got {got}")
got = after(lambda: C.dynamic_per_token_scaled_fp8_quant(int8.to(fp8), x, scales, None))
print(f"dynamic_per_token_scaled_fp8_quant of no rows: expected none got {got}")
