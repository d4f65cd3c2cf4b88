"""A checkpoint's weight as torch tensors: where adapters of libraries with a layout of their own begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.backend import Checkpoint, MoeCheckpoint

# Of experts that are decoded together: a code takes up to 64 bytes meanwhile.
_CODES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class TorchWeight:
    """One matrix. codes: int8 (N, K), signed, in [-2^(bits-1), 2^(bits-1)). scale: (N, G) in 16 bits. zero_point: int8
    (N, G), signed likewise, or None where the format is symmetric. group_size: columns a scale, K for a channel.
    group: int64 (K), the group of each column under act-order; None where groups are contiguous."""

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    group_size: int
    bias: torch.Tensor | None
    group: torch.Tensor | None = None

    @property
    def unsigned(self) -> torch.Tensor:
        """uint8 (N, K): the codes as they are stored, from 0."""
        return (self.codes.to(torch.int16) + 2 ** (self.bits - 1)).to(torch.uint8)

    @property
    def unsigned_zero_point(self) -> torch.Tensor:
        """uint8 (N, G): the code that means zero; 2^(bits-1) where the format is symmetric."""
        if self.zero_point is None:
            return torch.full_like(self.scale, 2 ** (self.bits - 1), dtype=torch.uint8)
        return (self.zero_point.to(torch.int16) + 2 ** (self.bits - 1)).to(torch.uint8)

    @property
    def centred(self) -> torch.Tensor:
        """int16 (N, K): codes less their zero points, q - z, what the scale multiplies."""
        codes = self.codes.to(torch.int16)
        return codes if self.zero_point is None else codes - self.spread(self.zero_point.to(torch.int16))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of groups (N, G) as values of columns (N, K)."""
        if self.group is not None:
            return values[:, self.group]
        return values.repeat_interleave(self.group_size, dim=1)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """(q - z) * s (N, K), exact in float32 and float64, rounded once to a dtype of 16 bits."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.centred.to(wide) * self.spread(self.scale).to(wide)).to(dtype)


def weight_of(checkpoint: Checkpoint, act_order: bool = False) -> TorchWeight:
    """The weight of a dense layer. act_order: the backend has it. Raises NotImplementedError where it has not."""
    n, k = checkpoint.tensors["weight_shape"].tolist()
    return _decoded(checkpoint.tensors, checkpoint.weights, n, k, act_order)


def experts_of(checkpoint: MoeCheckpoint, which: str, act_order: bool = False) -> list[TorchWeight]:
    """The weights of one projection, an expert each. which: `w13`, `w2`, `shared_w13` or `shared_w2`. act_order: as in
    `weight_of`."""
    h, i = checkpoint.hidden, checkpoint.intermediate
    n, k = (2 * i, h) if which.endswith("w13") else (h, i)
    own = {
        name.removeprefix(f"{which}_"): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(f"{which}_")
    }
    at_once = max(1, _CODES_AT_ONCE // (n * k))
    found = []
    for first in range(0, len(own["weight_packed"]), at_once):
        some = {name: tensor[first : first + at_once] for name, tensor in own.items()}
        found += _each(_decoded(some, checkpoint.weights, n, k, act_order))
    return found


def _each(stack: TorchWeight) -> list[TorchWeight]:
    """The matrices of a stack."""
    parts = (stack.codes, stack.scale, stack.zero_point, stack.bias, stack.group)
    each = zip(*([None] * len(stack.codes) if part is None else part for part in parts), strict=True)
    return [
        replace(stack, codes=codes, scale=scale, zero_point=zero_point, bias=bias, group=group)
        for codes, scale, zero_point, bias, group in each
    ]


def _decoded(
    tensors: Mapping[str, Any], args: Mapping[str, Any], n: int, k: int, act_order: bool
) -> TorchWeight:
    """Of a matrix, or of a stack of them as one weight with a dimension in front."""
    index = tensors.get("weight_g_idx")
    if index is not None and not act_order:
        raise NotImplementedError("weight_g_idx: this backend has no group activation ordering")
    bits, scale = int(args["num_bits"]), tensors["weight_scale"]
    zero_point = None
    if not args["symmetric"]:
        zero_point = unpacked(tensors["weight_zero_point"], bits, n, 0)
    codes = unpacked(tensors["weight_packed"], bits, k, 1)
    group = None if index is None else index.long()
    return TorchWeight(bits, codes, scale, zero_point, k // scale.shape[-1], tensors.get("bias"), group)


def unpacked(words: torch.Tensor, bits: int, size: int, axis: int) -> torch.Tensor:
    """Signed codes int8 of dense little-endian bit streams of 32-bit words, a matrix or a stack of them; axis: of a
    matrix, the packed one."""
    lines = words if axis == 1 else words.mT
    stream = (lines[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    fields = stream.flatten(-2)[..., : size * bits].unflatten(-1, (size, bits))
    codes = (fields << torch.arange(bits, dtype=torch.int32, device=words.device)).sum(-1) - 2 ** (bits - 1)
    return (codes if axis == 1 else codes.mT).to(torch.int8).contiguous()


def packed(codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 words of unsigned codes (two dimensions), the dense little-endian bit stream along axis."""
    lines = (codes if axis == 1 else codes.T).to(torch.int64)
    fields = (lines[..., None] >> torch.arange(bits, device=codes.device)) & 1
    stream = fields.flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(-1, (-1, 32))
    words = (stream << torch.arange(32, device=codes.device)).sum(-1).to(torch.int32)
    return (words if axis == 1 else words.T).contiguous()
