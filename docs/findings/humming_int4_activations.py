"""int4 activations, in the support matrix from SM80 on: 512 is expected. The layer by itself ends in a bare
assertion; with a tuning config of the library's own heuristics it answers."""

import torch
from humming.layer import HummingLayer
from humming.schema import is_humming_schema_compatible
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 4, "type": "int"}
WEIGHTS = METHOD | {"symmetric": True, "strategy": "group", "group_size": 128}
INPUTS = METHOD | {"symmetric": True, "strategy": "token", "dynamic": True}
n, k, bf16 = 256, 512, torch.bfloat16
layer = HummingLayer(n, k, WEIGHTS, INPUTS, torch_dtype=bf16).cuda()
layer.load_from_tensors(
    {
        "weight_packed": torch.full((n, k // 8), -0x66666667, dtype=torch.int32),  # codes of 9, weights of 1
        "weight_scale": torch.ones((n, 4), dtype=bf16),
        "weight_shape": torch.tensor([n, k]),
    }
)
layer.transform()
claimed = is_humming_schema_compatible(layer.input_schema, layer.weight_schema, bf16)
x = torch.ones((8, k), dtype=bf16, device="cuda")
try:
    got = layer(x)[0, 0].item()
except Exception as error:
    got = f"{type(error).__name__}({str(error)!r})"
y = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))
print(
    f"humming_int4_activations: expected 512.0 or a message (is_humming_schema_compatible: {claimed}), got {got}; "
    f"with a tuning config of its own heuristics {y[0, 0].item()}"
)
