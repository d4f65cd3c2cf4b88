"""One row, K = 4096, fp16: half an ulp of the exact result is expected, and the same answer twice. K / (2
tiles) partial sums are added by atomics in fp16. Errors in units of half an ulp."""

import torch
from gemlite.helper import A16W4_HQQ_INT

torch.manual_seed(0)
n, k, g, half = 256, 4096, 128, torch.float16
u = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
s, z = (torch.full((n, k // g), v, dtype=half, device="cuda") for v in (2.0**-6, 8.0))
layer = A16W4_HQQ_INT(device="cuda", dtype=half).from_weights(u, s, z)
x = torch.randn(1, k, device="cuda").to(half)
y, again = layer(x), layer(x)
exact = x.double() @ ((u.double() - 8) * 2.0**-6).T
error = (y.double() - exact).abs() / 2.0 ** (torch.frexp(exact.abs())[1].double() - 12)
print(
    f"gemlite_sums_in_16_bits {half} M=1 K={k}: expected errors up to 1 got up to {float(error.max()):.0f}, "
    f"median {float(error.median()):.1f}; the same call again differs in {int((y != again).sum())} of {y.numel()}"
)
