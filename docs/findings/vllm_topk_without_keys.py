"""topk_sigmoid with a bias that makes every key smaller than -1, and grouped_topk of a token whose logits are -inf
but for one: each choice is expected to be another expert. Both choose expert 0 where no key is above their start."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))


def empty(top_k):
    return [
        torch.empty((1, top_k), dtype=kind, device="cuda")
        for kind in (torch.float32, torch.int32, torch.int32)
    ]


logits = torch.linspace(-1, 1, 60, device="cuda")[None].contiguous()
weights, ids, rows = empty(6)
torch.ops._moe_C.topk_sigmoid(weights, ids, rows, logits, False, torch.full((60,), -3.0, device="cuda"), 1.0)
print(f"topk_sigmoid, keys below -1: expected [54, 55, 56, 57, 58, 59] got {sorted(ids[0].tolist())}")
logits = torch.full((1, 256), -torch.inf, dtype=torch.float16, device="cuda")
logits[0, 225] = 1.0
bias = torch.zeros(256, device="cuda")
_, ids = torch.ops._moe_C.grouped_topk(logits, 4, 2, 8, True, 1.0, bias, 1)
print(f"grouped_topk, logits of -inf but one: expected 8 different experts got {sorted(ids[0].tolist())}")
