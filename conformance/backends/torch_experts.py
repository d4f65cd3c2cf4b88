"""Gated activations and the experts' layer in plain torch, from matrices: one expert after the other.

As in the reference implementations of serving libraries, what lies between two operations has 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from conformance.backend import MoeCheckpoint
from conformance.backends.torch_routing import local_ids, slots_by_expert
from reference.swiglu import GatedActivation

Quantize = Callable[[torch.Tensor], torch.Tensor]


def swiglu(x: torch.Tensor, gated: GatedActivation) -> torch.Tensor:
    """h (M, I) of x (M, 2I), computed in float32 and rounded once."""
    if gated.arrangement == "interleaved":
        gate, up = x[:, 0::2].float(), x[:, 1::2].float()
    else:
        gate, up = (half.float() for half in x.chunk(2, dim=1))
        if gated.arrangement == "up-gate":
            gate, up = up, gate
    if gated.limit is not None:
        up = up.clamp(-gated.limit, gated.limit)
        if gated.clamp == "before":
            gate = gate.clamp(max=gated.limit)
    if gated.kind == "silu":
        activated = gate * torch.sigmoid(gated.alpha * gate)
    else:
        form = "tanh" if gated.kind == "gelu-tanh" else "none"
        activated = torch.nn.functional.gelu(gate, approximate=form)
    if gated.limit is not None and gated.clamp == "after":
        activated = activated.clamp(max=gated.limit)
    return (activated * (up + gated.beta)).to(x.dtype)


@dataclass(frozen=True)
class TorchExperts:
    """A layer whose weights are matrices: w13 (E, 2I, H), w2 (E, H, I) and biases or None; shared: the same of one
    more expert, or None. quantize: what the input of each projection becomes, in float32."""

    checkpoint: MoeCheckpoint
    w13: torch.Tensor
    w2: torch.Tensor
    shared: tuple[torch.Tensor, torch.Tensor] | None
    quantize: Quantize

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        layer = self.checkpoint
        places = local_ids(ids, layer.expert_map)
        outputs = torch.zeros((ids.numel(), layer.hidden), dtype=x.dtype, device=x.device)
        for expert, slots in slots_by_expert(places, len(self.w13)):
            inputs = x[slots // ids.shape[1]]
            if layer.weights_on_input:
                inputs = (inputs.float() * weights.flatten()[slots, None]).to(x.dtype)
            outputs[slots] = self._expert(inputs, "", expert)
        outputs = outputs.view(*ids.shape, layer.hidden)
        if not layer.weights_on_input:
            outputs = outputs.float() * weights[:, :, None]
        routed = outputs.float().sum(dim=1).to(x.dtype)
        if layer.routed_scaling_factor != 1:
            routed = (routed.float() * layer.routed_scaling_factor).to(x.dtype)
        return routed if self.shared is None else routed + self._expert(x, "shared_", 0)

    def _expert(self, x: torch.Tensor, prefix: str, expert: int) -> torch.Tensor:
        w13, w2 = self.shared if prefix and self.shared is not None else (self.w13, self.w2)
        gate_up = self._project(x, w13[expert], self._bias(f"{prefix}w13_bias", expert))
        h = swiglu(gate_up, self.checkpoint.activation)
        return self._project(h, w2[expert], self._bias(f"{prefix}w2_bias", expert))

    def _bias(self, name: str, expert: int) -> torch.Tensor | None:
        found = self.checkpoint.tensors.get(name)
        return None if found is None else found[expert].float()

    def _project(self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(self.quantize(x), matrix.float(), bias).to(x.dtype)
