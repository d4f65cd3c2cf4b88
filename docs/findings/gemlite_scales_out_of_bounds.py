"""K = 384 in groups of 128, split in 2, 4, 8: what lies behind the scales is expected not to matter. Split K
reads the scales and zero points of groups that do not exist and multiplies them by 0; NaN stays NaN."""

import gemlite
import torch
from gemlite.helper import A16W4_HQQ_INT
from gemlite.triton_kernels import gemm_splitK_kernels

gemlite.core.set_autotune("default")  # fewer tile shapes to time; the default setting has them too
n, k, g, m, half = 64, 384, 128, 16, torch.float16
u = torch.full((n, k), 9, dtype=torch.uint8, device="cuda")
s, z = (torch.full((n, k // g), v, dtype=half, device="cuda") for v in (1.0, 8.0))
for kind, behind in (("1.0", 1.0), ("NaN", float("nan"))):
    wrong = []
    for split in (1, 2, 4, 8):
        layer = A16W4_HQQ_INT(device="cuda", dtype=half).from_weights(u, s, z)
        for name in ("scales", "zeros"):
            memory = torch.full((64, n), behind, dtype=half, device="cuda")
            memory[: k // g] = getattr(layer, name)
            setattr(layer, name, torch.nn.Parameter(memory[: k // g], requires_grad=False))
        tile = {
            "BLOCK_SIZE_M": 16,
            "BLOCK_SIZE_N": 64,
            "BLOCK_SIZE_K": 128,
            "GROUP_SIZE_M": 8,
            "SPLIT_K": split,
        }
        tile |= {"A_load_order": 0, "num_stages": 2, "num_warps": 4}
        signature = str((m, n, k, g, 8, 104))
        gemlite.core.GEMLITE_TRITON_CONFIG_CACHE["GEMM_SPLITK"] = {signature: tile}
        gemm_splitK_kernels.gemm_splitK_INT_kernel.cache.clear()
        y = layer.forward_manual(torch.ones(m, k, dtype=half, device="cuda"), "GEMM_SPLITK")
        wrong.append(f"split {split}: {int((y != k).sum())}")
    print(
        f"gemlite_scales_out_of_bounds, {kind} behind them: expected 0 of {m * n} elements wrong got "
        f"{'; '.join(wrong)}"
    )
