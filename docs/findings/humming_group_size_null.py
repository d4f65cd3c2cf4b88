"""compressed-tensors writes `group_size: null` for activations per token; int8 is expected."""

import torch
from humming.schema import BaseInputSchema

CONFIG = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 8, "type": "int"}
CONFIG |= {"symmetric": True, "strategy": "token", "dynamic": True, "group_size": None}
try:
    got = BaseInputSchema.from_config(CONFIG).to_humming_schema(torch.bfloat16).a_dtype
except Exception as error:
    got = f"{type(error).__name__}: {str(error)!r}"
print(f"humming_group_size_null: expected an answer, got {got}")
