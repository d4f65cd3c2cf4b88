"""awq_gemm: a slice of columns is expected to be read as such, and one scale for all of K = 512 to be taken
whatever N is. Strides are not asked for, and N is asked to be a multiple of the group."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(codes):
    """int32 (rows, N / 8) of codes (rows, N) in AWQ's order."""
    return (
        (codes.view(len(codes), -1, 8)[..., ORDER] << 4 * torch.arange(8, device="cuda"))
        .sum(-1)
        .to(torch.int32)
    )


k, n, half = 512, 128, torch.float16
generator = torch.Generator().manual_seed(1)
x = torch.randn((2, k), generator=generator).to("cuda", half)
u = words(torch.randint(0, 16, (k, n), generator=generator).cuda())
z = words(torch.randint(0, 16, (k // 128, n), generator=generator).cuda())
s = (torch.rand((k // 128, n), generator=generator) / 64).to("cuda", half)
wide = torch.full((2, k + 16), float("nan"), dtype=half, device="cuda")
wide[:, 8:-8] = x
got, right = (torch.ops._C.awq_gemm(a, u, s, z, 8) for a in (wide[:, 8:-8], x))
print(
    "awq x as a slice of columns: difference from the same rows: expected 0.0 "
    f"got {float((got - right).abs().max())}"
)
try:
    got = (torch.ops._C.awq_gemm(x, u, s[:1].contiguous(), z[:1].contiguous(), 8)[0, :4] * 0).tolist()
except Exception as error:
    got = f"{type(error).__name__}: {error}"
print(
    f"awq one scale a row with N = {n}, K = {k}: expected [0.0, 0.0, 0.0, 0.0] or a reason that is true got {got}"
)
