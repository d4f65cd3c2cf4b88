"""The experts' layer around a library's grouped projection, as serving libraries put it together.

What lies between two operations has 16 bits. A library computes the two projections; the activation, the weighted sum
and the shared expert are torch's own, as in `torch_experts`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from conformance.backend import MoeCheckpoint
from conformance.backends.torch_experts import swiglu
from conformance.backends.torch_routing import local_ids

# x (T, K) in 16 bits, places int32 (T, k) of present experts or -1 -> (T, k, N) in 16 bits; the rows of -1 are not read
Projection = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GroupedExperts:
    """moe(x, weights, ids) of two projections. shared: those of the shared expert, asked with places of 0, or None."""

    def __init__(
        self,
        checkpoint: MoeCheckpoint,
        w13: Projection,
        w2: Projection,
        shared: tuple[Projection, Projection] | None = None,
    ) -> None:
        self.checkpoint, self.w13, self.w2, self.shared = checkpoint, w13, w2, shared

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        layer = self.checkpoint
        places = local_ids(ids, layer.expert_map).to(torch.int32)
        inputs = x
        if layer.weights_on_input:  # top_k is 1
            inputs = (x.float() * weights).to(x.dtype)
        outputs = _chained(inputs, places, self.w13, self.w2, layer)
        outputs = torch.where(places[..., None] < 0, 0.0, outputs.float())
        if not layer.weights_on_input:
            outputs = outputs * weights[..., None]
        routed = outputs.sum(dim=1).to(x.dtype)
        if layer.routed_scaling_factor != 1:
            routed = (routed.float() * layer.routed_scaling_factor).to(x.dtype)
        if self.shared is None:
            return routed
        everyone = torch.zeros((len(x), 1), dtype=torch.int32, device=x.device)
        return routed + _chained(x, everyone, *self.shared, layer)[:, 0]


def _chained(
    x: torch.Tensor, places: torch.Tensor, w13: Projection, w2: Projection, layer: MoeCheckpoint
) -> torch.Tensor:
    """(T, k, H): both projections of each slot."""
    gate_up = w13(x, places)
    h = swiglu(gate_up.flatten(0, 1), layer.activation)
    slots = places.reshape(-1, 1)
    return w2(h, slots).reshape(*places.shape, layer.hidden)
