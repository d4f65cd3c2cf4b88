"""grouped_topk: a NaN logit is expected to be passed over, as its other kernel does; and of two bf16 logits
the larger to be chosen, as for 128 experts. More than 32 experts a group are scored in 16 bits."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))


def grouped(logits, groups, k, renormalize):
    bias = torch.zeros(logits.shape[1], device="cuda")
    weights, ids = torch.ops._moe_C.grouped_topk(logits, groups, 2, k, renormalize, 1.0, bias, 1)
    return sorted(ids[0].tolist()), [round(v, 5) for v in weights[0].tolist()]


logits = torch.linspace(-1, 1, 128, device="cuda")[None].clone()
logits[0, 5] = float("nan")
got = grouped(logits, 8, 6, True)
print(f"grouped_topk, a NaN logit among 128 experts in 8 groups: expected no expert 5, no NaN got {got}")
logits = torch.full((1, 256), -4.0, dtype=torch.bfloat16, device="cuda")
logits[0, 0], logits[0, 1] = 5, 5.03125
got = grouped(logits, 4, 1, False)
print(f"grouped_topk, bf16, 256 experts in 4 groups: expected ([1], [0.99351]) got {got}")
