"""What a rank of a divided layer of experts holds, cut by our own kernels (C100 to C104).

Tensors that are packed along what is cut are unpacked, cut and packed again: a legal cut gives the words that the whole
layer has.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch

from conformance.backend import MoeCheckpoint
from cuda_kernels.runtime import THREADS, Runtime, blocks_for

_WORD = 32


class Packs(Protocol):
    """A backend that has a runtime, and packs."""

    runtime: Runtime

    def pack(self, codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor: ...

    def unpack(self, words: torch.Tensor, bits: int, size: int, axis: int) -> torch.Tensor: ...


def shard(backend: Packs, layer: MoeCheckpoint, ranks: str, rank: int) -> MoeCheckpoint:
    """What a rank of `tpT` or `epT` holds.

    Raises ValueError for a cut that a loader cannot make (C101), naming the tensor, the reason and the remedy.
    """
    way, count = ranks[:2], int(ranks[2:])
    if way not in ("tp", "ep") or not 0 <= rank < count:
        raise ValueError(
            f"ranks: {ranks!r} and rank {rank} are not `tp` or `ep` with a number of ranks, and one of them"
        )
    return _dealt(backend, layer, count, rank) if way == "ep" else _Units(backend, layer, count, rank).cut()


def _dealt(backend: Packs, layer: MoeCheckpoint, count: int, rank: int) -> MoeCheckpoint:
    """A run of whole experts, one more on each of the first E mod T ranks; the shared one on rank 0 (C104)."""
    if layer.expert_map is not None:
        raise ValueError("expert_map: the experts are divided already; divide the whole layer")
    if count > layer.experts:
        raise ValueError(f"w13_weight_packed: {count} ranks for {layer.experts} experts; use fewer ranks")
    each, more = divmod(layer.experts, count)
    first, held = rank * each + min(rank, more), each + (rank < more)
    tensors = {}
    for name, tensor in layer.tensors.items():
        if not name.startswith("shared_"):
            tensors[name] = taken(backend.runtime, tensor, 0, first, held)
        elif rank == 0:
            tensors[name] = taken(backend.runtime, tensor, 0, 0, len(tensor))
    places = torch.empty(layer.experts, dtype=torch.int32, device=backend.runtime.device)
    backend.runtime.launch(
        "place_experts", blocks_for(layer.experts), THREADS, places, layer.experts, first, held
    )
    return replace(layer, tensors=tensors, expert_map=places)


class _Units:
    """Some units of the intermediate of every expert: rows of w13, in both halves, and columns of w2 (C100)."""

    def __init__(self, backend: Packs, layer: MoeCheckpoint, count: int, rank: int) -> None:
        self.backend, self.layer, self.count, self.rank = backend, layer, count, rank
        self.bits = int(layer.weights["num_bits"])
        self.strategy = layer.weights["strategy"]
        self.share = layer.intermediate // count
        self.first = self.share * rank
        # Under act-order every rank has all groups of w2: its g_idx names them (C102).
        self.groups_cut = self.strategy == "group" and "w2_weight_g_idx" not in layer.tensors

    def cut(self) -> MoeCheckpoint:
        self._check()
        tensors = {name: self._of(name.removeprefix("shared_"), t) for name, t in self.layer.tensors.items()}
        return replace(self.layer, tensors=tensors, intermediate=self.share)

    def _check(self) -> None:
        size, remedy = self.layer.intermediate, "use another number of ranks"
        if size % self.count:
            raise ValueError(f"w2_weight_packed: {self.count} ranks do not divide {size} columns; {remedy}")
        where = f"{self.count} ranks cut {size} columns after every {self.share}"
        if self.count > 1 and self.share * self.bits % _WORD:
            raise ValueError(
                f"w2_weight_packed: {where}, inside a 32-bit word of {self.bits}-bit codes; {remedy}, or repack the "
                "checkpoint"
            )
        if self.groups_cut and self.share % self.layer.weights["group_size"]:
            group = self.layer.weights["group_size"]
            raise ValueError(
                f"w2_weight_scale: {where}, inside a group of {group}; {remedy}, or a smaller group_size"
            )

    def _of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "w2_bias" and self.rank > 0:  # once in the sum of the ranks
            return torch.zeros_like(tensor)
        scales = name.endswith(("weight_scale", "weight_zero_point"))
        if name in ("w13_weight_g_idx", "w2_bias") or (scales and self.strategy == "tensor"):
            return self._range(tensor, 0, 0, len(tensor))
        if name == "w13_weight_zero_point":
            zero_points = self.backend.unpack(tensor, self.bits, 2 * self.layer.intermediate, 1)
            return self.backend.pack(self._rows(zero_points), self.bits, 1)
        if name.startswith("w13_"):
            return self._rows(tensor)
        if name == "w2_weight_g_idx":
            return self._range(tensor, 1, self.first, self.share)
        if name == "w2_weight_packed":
            codes = self.backend.unpack(tensor, self.bits, self.layer.intermediate, 2)
            return self.backend.pack(self._range(codes, 2, self.first, self.share), self.bits, 2)
        if not self.groups_cut:
            return self._range(tensor, 0, 0, len(tensor))
        group = int(self.layer.weights["group_size"])
        return self._range(tensor, 2, self.first // group, self.share // group)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of the rank's units in w13 (E, 2I, ...): pairs, or one run in each half."""
        if self.layer.activation.arrangement == "interleaved":
            return self._range(tensor, 1, 2 * self.first, 2 * self.share)
        halves = tensor.unflatten(1, (2, self.layer.intermediate))
        return self._range(halves, 2, self.first, self.share).flatten(1, 2)

    def _range(self, tensor: torch.Tensor, axis: int, first: int, count: int) -> torch.Tensor:
        return taken(self.backend.runtime, tensor, axis, first, count)


def taken(runtime: Runtime, tensor: torch.Tensor, axis: int, first: int, count: int) -> torch.Tensor:
    """A copy of `count` places of an axis, from `first` on."""
    shape = list(tensor.shape)
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :]) * tensor.element_size()
    found = torch.empty((*shape[:axis], count, *shape[axis + 1 :]), dtype=tensor.dtype, device=tensor.device)
    runtime.launch(
        "take_range", blocks_for(outer * count * inner), THREADS, tensor.contiguous(), found, outer, shape[axis], inner,
        first, count,
    )  # fmt: skip
    return found
