"""Asymmetric int8 activations per token in fp16, a row of small numbers: (max - min) / 255 is expected as its scale.
It is kept at or above 2^-14, the least normal number of fp16. CPU or CUDA."""

import torch
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

x = torch.linspace(-1e-4, 2e-4, 128).half()[None]
block, limits = (1, 128), {"quant_min": -128, "quant_max": 127}
scale, zero = choose_qparams_affine(
    x, MappingType.ASYMMETRIC, block, target_dtype=torch.int8, zero_point_dtype=torch.int8, **limits
)
codes = quantize_affine(x, block, scale, zero, torch.int8, **limits)
expected = (x.max() - x.min()).item() / 255
print(
    f"torchao_asymmetric_activations_fp16: expected a scale of {expected:.3g} and 128 codes got {scale.item():.3g} and "
    f"{len(codes.unique())} codes"
)
