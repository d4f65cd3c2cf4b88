"""8-bit weights with zero points, int8 activations: the support matrix ends at 7 bits, so a refusal is
expected, or the product of (u - z) * s. The layer takes them and leaves the zero points out."""

import numpy as np
import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 8, "type": "int"}
WEIGHTS = METHOD | {"symmetric": False, "strategy": "channel"}
INPUTS = METHOD | {"symmetric": True, "strategy": "token", "dynamic": True}
n, k, s = 256, 512, 2.0**-8
rng = np.random.default_rng(0)
u, z = rng.integers(0, 256, (n, k)), rng.integers(0, 256, (n, 1))
x = torch.from_numpy(rng.normal(size=(16, k))).to(torch.bfloat16)

layer = HummingLayer(n, k, WEIGHTS, INPUTS, torch_dtype=torch.bfloat16).cuda()
layer.load_from_tensors(
    {
        "weight_packed": torch.from_numpy(u.astype(np.uint8).view("<i4")),
        "weight_zero_point": torch.from_numpy(z.T.astype(np.uint8).view("<i4").T.copy()),
        "weight_scale": torch.full((n, 1), s, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }
)
layer.transform()
y = layer(x.cuda(), tuning_config=get_heuristics_config(layer.humming_config, shape_m=16))


def error(zero):
    right = x.double().numpy() @ ((u - zero) * s).T
    return np.linalg.norm(y.double().cpu().numpy() - right) / np.linalg.norm(right)


print(
    f"humming_w8_asym_int8: expected a relative error below 0.02 or a refusal, got {error(z):.3f}; "
    f"of codes - 128, zero points left out, {error(128):.3f}"
)
