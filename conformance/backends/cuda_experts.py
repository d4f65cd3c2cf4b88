"""Routers and experts by our own kernels: what the host does is shapes, room to work in, and launches.

A layer of experts is align -> quantize -> project w13 -> swiglu -> quantize -> project w2 -> combine. What lies between
two kernels has 16 bits. Nothing is read back from the device, so that a layer can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from conformance.backend import MoeCheckpoint
from conformance.backends.cuda_sharding import shard
from cuda_kernels.linear import DTYPES, Activations, PackedWeight, Slots, project, quantize
from cuda_kernels.runtime import THREADS, Runtime, blocks_for
from reference.formats import ActivationFormat
from reference.routing import Routing
from reference.swiglu import GatedActivation

# What the kernels know formats and formulas by: numbers of routing.cuh and swiglu.cu.
_LOGITS = {**DTYPES, torch.float32: 2}
_SCORINGS = {"softmax": 0, "softmax-selected": 0, "sigmoid": 1}
_KINDS = {"silu": 0, "gelu": 1, "gelu-tanh": 2}
_ARRANGEMENTS = {"gate-up": 0, "up-gate": 1, "interleaved": 2}

_WARP = 32
_CHUNK = 256  # slots that one thread of the block alignment looks through
_BLOCK, _LARGE_BLOCK = 16, 64  # rows of one expert that a projection takes at a time


class CudaExperts(ABC):
    """The operations of routers and experts, of a backend that has a runtime and packs."""

    runtime: Runtime

    @abstractmethod
    def pack(self, codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor: ...

    @abstractmethod
    def unpack(self, words: torch.Tensor, bits: int, size: int, axis: int) -> torch.Tensor: ...

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises ValueError for logits of other experts than the routing's, and for a bias that it does not have or
        lacks."""
        tokens, experts = logits.shape
        if experts != routing.experts or routing.bias != (bias is not None):
            raise ValueError(f"route: logits of {experts} experts, bias {bias is not None}, for {routing}")
        device = logits.device
        weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=device)
        ids = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=device)
        scores, keys = (torch.empty((tokens, experts), dtype=torch.float32, device=device) for _ in range(2))
        group_keys = torch.empty((tokens, routing.groups), dtype=torch.float32, device=device)
        by_warps = self.runtime.cooperative
        self.runtime.launch(
            "route_by_warps" if by_warps else "route", blocks_for(tokens * (_WARP if by_warps else 1)), THREADS,
            logits.contiguous(), _LOGITS[logits.dtype], None if bias is None else bias.contiguous(), tokens, experts,
            routing.top_k, _SCORINGS[routing.scoring], int(routing.normalized), routing.groups, routing.top_groups,
            int(routing.group_score == "sum-of-two"), routing.scaling, scores, keys, group_keys, weights, ids,
        )  # fmt: skip
        return weights, ids

    def align_block_size(
        self, ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return aligned(self.runtime, ids, experts, block, expert_map)

    def swiglu(self, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
        return gated(self.runtime, x, activation)

    def load_moe(self, checkpoint: MoeCheckpoint) -> Experts:
        return Experts(self.runtime, checkpoint)

    def shard_moe(self, checkpoint: MoeCheckpoint, ranks: str, rank: int) -> MoeCheckpoint:
        return shard(self, checkpoint, ranks, rank)


def aligned(
    runtime: Runtime, ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sorted_ids, expert_ids and num_tokens_post_pad (C77), with as much room as the shape of ids may need."""
    slots, chunks = ids.numel(), -(-ids.numel() // _CHUNK)
    # Experts that have slots are as many as slots at most, and each leaves less than a block unused.
    blocks = (slots + min(experts, slots) * (block - 1)) // block

    def numbers(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=ids.device)

    def launch(kernel: str, threads: int, *arguments: Any) -> None:
        runtime.launch(kernel, blocks_for(threads), THREADS, *arguments)

    ids = ids.contiguous()
    sorted_ids, expert_ids, padded = numbers(blocks * block), numbers(blocks), numbers(1)
    counts, totals, starts = numbers(chunks * experts), numbers(experts), numbers(experts + 1)
    launch("align_count", chunks * experts, ids, expert_map, slots, experts, _CHUNK, counts)
    launch("align_totals", experts, counts, totals, chunks, experts)
    launch("align_starts", experts + 1, totals, starts, padded, experts, block)
    launch("align_fill", blocks, starts, sorted_ids, expert_ids, slots, experts, block, blocks)
    launch(
        "align_place", chunks * experts, ids, expert_map, counts, starts, sorted_ids, slots, experts, _CHUNK
    )
    return sorted_ids, expert_ids, padded


def gated(runtime: Runtime, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """h (M, I) of gate and up x (M, 2I) in 16 bits (C80 to C84). Raises ValueError for another shape."""
    if x.ndim != 2 or x.shape[1] % 2:
        raise ValueError(f"x: shape {list(x.shape)}, expected [M, 2I]")
    rows, units = len(x), x.shape[1] // 2
    h = torch.empty((rows, units), dtype=x.dtype, device=x.device)
    limit = math.inf if activation.limit is None else activation.limit
    runtime.launch(
        "swiglu", blocks_for(h.numel()), THREADS, x.contiguous(), h, DTYPES[x.dtype], rows, units,
        _KINDS[activation.kind], activation.alpha, activation.beta, limit, int(activation.clamp == "after"),
        _ARRANGEMENTS[activation.arrangement],
    )  # fmt: skip
    return h


def target_of(args: Mapping[str, Any] | None) -> str | None:
    """What a layer quantizes its activations to, None for 16 bits. Raises NotImplementedError for formats that the
    projections do not take: static, by group or tensor, asymmetric."""
    fmt = ActivationFormat.from_quantization_args(args)
    if fmt.kind == "a16":
        return None
    if not fmt.dynamic or fmt.strategy != "token" or not fmt.symmetric:
        raise NotImplementedError(f"input activations {fmt.name}: only by token, dynamic and symmetric")
    return fmt.kind


class Expert:
    """Both projections of a stack of experts. prefix: `` or `shared_`."""

    def __init__(self, runtime: Runtime, layer: MoeCheckpoint, prefix: str = "") -> None:
        self.runtime, self.activation = runtime, layer.activation
        self.target = target_of(layer.input_activations)
        h, i = layer.hidden, layer.intermediate
        self.w13 = PackedWeight.load(layer.tensors, layer.weights, 2 * i, h, f"{prefix}w13_")
        self.w2 = PackedWeight.load(layer.tensors, layer.weights, h, i, f"{prefix}w2_")

    def __call__(
        self, x: torch.Tensor, first: Slots | None = None, second: Slots | None = None
    ) -> torch.Tensor:
        """A row of H numbers for each slot, or for each row of x (T, H). first, second: of the two projections."""
        gate_up = project(self.runtime, self.w13, self._quantized(x), first)
        h = gated(self.runtime, gate_up, self.activation)
        return project(self.runtime, self.w2, self._quantized(h), second)

    def _quantized(self, x: torch.Tensor) -> Activations:
        return Activations(x) if self.target is None else quantize(self.runtime, x, self.target)


class Experts:
    """moe(x, weights, ids) of one layer, or of what a rank holds of it."""

    def __init__(self, runtime: Runtime, layer: MoeCheckpoint) -> None:
        """Raises ValueError for tensors that do not fit, NotImplementedError for formats that kernels do not have."""
        if layer.weights_on_input and layer.top_k != 1:
            raise ValueError(f"weights_on_input: legal for top_k 1 only, not for {layer.top_k} (C95)")
        self.runtime, self.layer = runtime, layer
        self.routed = Expert(runtime, layer)
        self.shared = (
            Expert(runtime, layer, "shared_") if "shared_w13_weight_packed" in layer.tensors else None
        )

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """y (T, H) of x (T, H) in 16 bits, weights float32 and ids int32 (T, k). Raises ValueError for other shapes."""
        layer, tokens = self.layer, len(x)
        shapes = [list(t.shape) for t in (x, weights, ids)]
        if shapes != [[tokens, layer.hidden], [tokens, layer.top_k], [tokens, layer.top_k]]:
            raise ValueError(
                f"x, weights, ids: shapes {shapes}, expected [T, {layer.hidden}] and twice [T, {layer.top_k}]"
            )
        x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
        dtype, slots = DTYPES[x.dtype], ids.numel()
        block = _LARGE_BLOCK if slots >= _LARGE_BLOCK // 2 * layer.experts else _BLOCK
        sorted_ids, expert_ids, _ = aligned(self.runtime, ids, layer.experts, block, layer.expert_map)
        inputs = x
        if layer.weights_on_input:
            inputs = torch.empty_like(x)
            self.runtime.launch(
                "weigh_input", blocks_for(x.numel()), THREADS, x, weights, inputs, dtype, tokens, layer.hidden
            )
        first, second = (Slots(sorted_ids, expert_ids, block, slots, k) for k in (layer.top_k, 1))
        outputs = self.routed(inputs, first, second)
        shared = None if self.shared is None else self.shared(x)
        y = torch.empty_like(x)
        self.runtime.launch(
            "combine", blocks_for(y.numel()), THREADS, outputs, None if layer.weights_on_input else weights, ids,
            layer.expert_map, shared, y, dtype, tokens, layer.hidden, layer.top_k, layer.experts,
            layer.routed_scaling_factor,
        )  # fmt: skip
        return y
