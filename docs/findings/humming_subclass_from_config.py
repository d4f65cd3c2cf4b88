"""HummingInputSchema.from_config of a compressed-tensors config: int8 activations are expected, as of the
base class, or a refusal. It drops what the config asks for."""

import torch
from humming.schema import BaseInputSchema, HummingInputSchema

CONFIG = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 8, "type": "int"}
CONFIG |= {"symmetric": True, "strategy": "token", "dynamic": True}
base = BaseInputSchema.from_config(dict(CONFIG)).to_humming_schema(torch.bfloat16).a_dtype
sub = HummingInputSchema.from_config(dict(CONFIG)).a_dtype
print(f"humming_subclass_from_config: expected {base} (that of the base class) or a refusal, got {sub}")
