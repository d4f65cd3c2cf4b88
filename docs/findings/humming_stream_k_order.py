"""Equal calls are expected to answer alike, within half an ulp of the exact product. Stream-K adds the parts
of an output in bfloat16, in the order in which they arrive."""

import numpy as np
import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
WEIGHTS = METHOD | {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
n, k, bf16 = 1024, 8192, torch.bfloat16
rng = np.random.default_rng(0)
u = rng.integers(0, 16, (n, k))
x = torch.from_numpy(rng.normal(size=(16, k))).to(bf16)
words = (u.reshape(n, -1, 8) << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)
layer = HummingLayer(n, k, WEIGHTS, None, torch_dtype=bf16).cuda()
layer.load_from_tensors(
    {
        "weight_packed": torch.from_numpy(words),
        "weight_scale": torch.full((n, k // 128), 2.0**-6, dtype=bf16),
        "weight_shape": torch.tensor([n, k]),
    }
)
layer.transform()
tuning = get_heuristics_config(layer.humming_config, shape_m=16)
answers = [layer(x.cuda(), tuning_config=tuning).double().cpu().numpy() for _ in range(100)]
right = x.double().numpy() @ ((u - 8) * 2.0**-6).T
ulps = (np.abs(answers[0] - right) / 2.0 ** (np.floor(np.log2(np.abs(right))) - 7))[np.abs(right) > 1]
print(
    "humming_stream_k_order: expected 1 answer of 100 equal calls, at most 0.5 ulp off; "
    f"got {len({a.tobytes() for a in answers})} answers, {ulps.max():.2f} ulp"
)
