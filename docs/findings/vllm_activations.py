"""Gated activations: the last of 2^17 + 1 rows, twos among ones, is expected to be answered (13 GB of
memory), and a slice of columns to be read as such. Offsets are 32 bits wide, strides are not asked for."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))


def last_row(name, *more):
    """The first number of the first row and of the last, which begins at 2^32."""
    tokens, width = 2**17 + 1, 2**15
    x = torch.ones((tokens, width), dtype=torch.bfloat16, device="cuda")
    x[-1] = 2
    out = torch.zeros((tokens, width // 2), dtype=torch.bfloat16, device="cuda")
    getattr(torch.ops._C, name)(out, x, *more)
    return [round(v, 5) for v in (out[0, 0].item(), out[-1, 0].item())]


def strided(name):
    """x as a slice of columns of NaN, aligned to 16 bytes, against the same numbers by themselves."""
    x = torch.randn((3, 128), generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    wide = torch.full((3, 144), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, 8:-8] = x
    outs = torch.zeros((2, 3, 64), dtype=torch.bfloat16, device="cuda")
    for out, given in zip(outs, (wide[:, 8:-8], x), strict=True):
        getattr(torch.ops._C, name)(out, given)
    return float((outs[0].float() - outs[1].float()).abs().max())


print(f"gelu_and_mul: expected [0.83984, 3.90625] got {last_row('gelu_and_mul')}")
got = last_row("silu_and_mul_with_clamp", 100.0, 1.0, 0.0)
print(f"silu_and_mul_with_clamp: expected [0.73047, 3.51562] got {got}")
got = strided("silu_and_mul")
print(f"silu_and_mul, x as a slice of columns: difference from the same rows: expected 0.0 got {got}")
print(f"swigluoai_and_mul, x as a slice of columns: expected 0.0 got {strided('swigluoai_and_mul')}")
