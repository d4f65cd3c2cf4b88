"""bf16 products of integers whose every partial sum float32 holds: one rounding of the exact sum is expected.
With torch's default, cuBLAS may join split sums in 16 bits."""

import torch

for allowed in (True, False):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
    wrong, total, where = 0, 0, []
    torch.manual_seed(0)
    for m in (1, 2, 7, 16, 17, 33, 64, 257):
        for n in (10, 64, 96, 128, 256, 8192):
            for k in (96, 256, 512, 640, 4096, 16384):
                x = torch.randint(-8, 9, (m, k), device="cuda").to(torch.bfloat16)
                w = torch.randint(-8, 9, (n, k), device="cuda").to(torch.bfloat16)
                y = torch.nn.functional.linear(x, w)
                bad = int((y != (x.double() @ w.double().T).float().to(torch.bfloat16)).sum())
                wrong, total = wrong + bad, total + y.numel()
                where += [f"{m}x{n}x{k}"] * (bad > 0)
    print(
        f"torch_split_sums torch.bfloat16 reduced {allowed}: expected 0 of {total} elements wrong got {wrong}, "
        f"in {len(where)} shapes: {' '.join(where[:12])}"
    )
