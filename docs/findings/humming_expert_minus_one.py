"""-1 in expert_ids, as moe_align_block_size writes for experts of another rank: its block is expected to be
skipped. It is an index into the weights."""

import torch
from humming.forward import humming_forward
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
WEIGHTS = METHOD | {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
n, k, bf16 = 256, 512, torch.bfloat16


def stack(count):
    """Experts of weights 1, 2, ..., scaled by 2^-9."""
    layer = HummingLayer(n, k, WEIGHTS, None, num_experts=count, torch_dtype=bf16).cuda()
    words = torch.tensor([0x11111111 * (9 + e) - 2**32 for e in range(count)], dtype=torch.int32)
    scale = torch.full((count, n, 1), 2.0**-9, dtype=bf16)
    words = words.view(-1, 1, 1).expand(-1, n, k // 8).contiguous()
    layer.load_from_tensors({"weight_packed": words, "weight_scale": scale})
    layer.transform()
    return layer


try:
    three, two = stack(3), stack(2)
    tuning = get_heuristics_config(two.humming_config, shape_m=16, gemm_type="indexed")
    block = tuning["block_shape"][0]
    outputs = torch.full((2 * block, n), 777.0, dtype=bf16, device="cuda")
    humming_forward(
        two.humming_config,
        inputs=torch.ones((2 * block, k), dtype=bf16, device="cuda"),
        outputs=outputs,
        weight=three.weight[1:],  # the expert before the stack is the first of three
        weight_scale=three.weight_scale[1:],
        locks=three.locks,
        top_k=1,
        valid_shape_m=16,
        sorted_ids=torch.arange(2 * block, dtype=torch.int32, device="cuda"),
        expert_ids=torch.tensor([0, -1], dtype=torch.int32, device="cuda"),
        num_tokens_padded=torch.tensor([2 * block], dtype=torch.int32, device="cuda"),
        compute_config={"gemm_type": "indexed"},
        tuning_config=tuning,
    )
    torch.cuda.synchronize()
    got = f"{outputs[0, 0].item()} and {outputs[block, 0].item()} (1.0: weights before the stack were read)"
    print(f"humming_expert_minus_one: expected 2.0 and, untouched, 777.0 (or 0.0); got {got}")
except Exception as error:
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]!r}"
    print(f"humming_expert_minus_one: expected an answer, got {got}")
