"""N = 36, and K = 520 with int8 activations: an answer is expected, or a refusal that names what it does not
take."""

import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized", "type": "int", "symmetric": True}
WEIGHTS = METHOD | {"num_bits": 4, "strategy": "channel"}
INT8 = METHOD | {"num_bits": 8, "strategy": "token", "dynamic": True}
bf16 = torch.bfloat16
found = []
for n, k, inputs in ((36, 512, None), (256, 520, INT8)):
    try:
        layer = HummingLayer(n, k, WEIGHTS, inputs, torch_dtype=bf16).cuda()
        words = torch.full((n, k // 8), -0x66666667, dtype=torch.int32)  # codes of 9, weights of 1
        scale = torch.ones((n, 1), dtype=bf16)
        layer.load_from_tensors(
            {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
        )
        layer.transform()
        x = torch.ones((8, k), dtype=bf16, device="cuda")
        y = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))
        found.append(str(y[0, 0].item()))
    except Exception as error:
        found.append(f"{type(error).__name__}({' '.join(str(error).split())[:120]!r})")
print(
    "humming_message_of_alignment: expected 512.0 and 520.0, or messages that name N or K, "
    f"got {'; '.join(found)}"
)
