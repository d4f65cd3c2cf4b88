"""Weight and activation formats, and the field's names for them.

A format is data about numbers, never about tensors: bits, symmetry, groups. Tensors that obey a format
live in `weights`, `packing` and `layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reference.errors import FormatError

Strategy = Literal["tensor", "channel", "group"]
ActivationKind = Literal["a16", "int8", "int4", "fp8"]

_WEIGHT_STRATEGIES = ("tensor", "channel", "group")
_ACTIVATION_KINDS = ("a16", "int8", "int4", "fp8")
_ACTIVATION_STRATEGIES = ("tensor", "token", "group")
_IGNORED_ARGS = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure"}
_KNOWN_ARGS = {"num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder"}


@dataclass(frozen=True)
class ScalarType:
    """One stored integer type: value = code - bias (C4).

    `uint4b8` is four unsigned bits whose value is code - 8; `uint4` has no bias and is used with a
    stored zero point; `int8` is two's complement. Names: vLLM's ScalarType.
    """

    bits: int
    bias: int = 0
    signed: bool = False

    @property
    def name(self) -> str:
        return f"{'' if self.signed else 'u'}int{self.bits}{f'b{self.bias}' if self.bias else ''}"

    @classmethod
    def parse(cls, name: str) -> ScalarType:
        """Read a name such as `uint3b4`. Raises FormatError for anything else."""
        match = re.fullmatch(r"(u?)int([1-8])(?:b(\d+))?", name)
        if match is None or (not match[1] and match[3]):
            raise FormatError(
                f"scalar type: {name!r} is not of the form uint<bits>[b<bias>] or int<bits> with 1 to 8 bits"
            )
        scalar = cls(int(match[2]), int(match[3] or 0), not match[1])
        if scalar.bias >= 2**scalar.bits:
            raise FormatError(f"scalar type: {name!r} has a bias outside its {scalar.bits} bits")
        return scalar


@dataclass(frozen=True)
class WeightFormat:
    """How a weight matrix (N, K) is quantized.

    bits: 1 to 8. symmetric: no stored zero point. group_size: columns that share a scale along K, or
    -1 for one scale a row. strategy: `tensor`, `channel` or `group`. short_last_group: whether K may
    leave a remainder that forms a shorter last group (GPTQ allows it, pack-quantized does not: C21).
    """

    bits: int
    symmetric: bool = True
    group_size: int = -1
    strategy: Strategy = "channel"
    short_last_group: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= 8:
            raise FormatError(f"num_bits: {self.bits!r} is not an integer from 1 to 8")
        if not isinstance(self.symmetric, bool):
            raise FormatError(f"symmetric: {self.symmetric!r} is not true or false")
        if self.strategy not in _WEIGHT_STRATEGIES:
            raise FormatError(f"strategy: {self.strategy!r} is not one of {', '.join(_WEIGHT_STRATEGIES)}")
        _check_group_size(self.group_size)
        if (self.group_size > 0) != (self.strategy == "group"):
            raise FormatError(
                f"group_size: {self.group_size} does not fit strategy {self.strategy!r}; "
                "use strategy 'group' with a positive group_size, 'channel' or 'tensor' with -1 or none"
            )

    @classmethod
    def of(cls, bits: int, group_size: int, symmetric: bool) -> WeightFormat:
        """The format of a cell: `group_size` -1 means channel."""
        return cls(bits, symmetric, group_size, "group" if group_size > 0 else "channel")

    @property
    def name(self) -> str:
        """As case ids spell it: `w3-g128-asym`, `w4-channel-sym`, `w8-tensor-sym`."""
        span = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        return f"w{self.bits}-{span}-{'sym' if self.symmetric else 'asym'}"

    @property
    def offset(self) -> int:
        """Stored code = signed code + offset (C4)."""
        return 1 << (self.bits - 1)

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest signed code."""
        return -self.offset, self.offset - 1

    @property
    def scalar_type(self) -> ScalarType:
        """uint4b8 for symmetric 4 bits, uint4 where a zero point is stored."""
        return ScalarType(self.bits, self.offset if self.symmetric else 0)

    def groups(self, k: int) -> int:
        """Number of scales along K. Raises FormatError when K leaves a remainder that is not allowed."""
        if self.strategy != "group":
            return 1
        if k % self.group_size and not self.short_last_group:
            raise FormatError(
                f"group_size: {self.group_size} does not divide K={k}; this format has no short last group"
            )
        return -(-k // self.group_size)

    @classmethod
    def from_quantization_args(cls, args: Mapping[str, Any]) -> WeightFormat:
        """Read the `weights` part of a compressed-tensors config group (C20).

        Absent fields take compressed-tensors' defaults: 8 bits, symmetric, strategy from group_size
        (none: tensor, -1: channel, positive: group). Raises FormatError naming the field.
        """
        _check_args(args, "weights")
        _require(args, "type", ("int",), "int", "only integer weights are packed")
        _require(args, "dynamic", (False, None), False, "weights are quantized ahead of time")
        _require(
            args, "actorder", (None, False, "weight", "static"), None,
            "compressed-tensors removed the orders that need a g_idx",
        )  # fmt: skip
        size, strategy = _span(args)
        return cls(args.get("num_bits", 8), args.get("symmetric", True), size, strategy)

    def to_quantization_args(self) -> dict[str, Any]:
        """The `weights` part of a compressed-tensors config group, as a checkpoint stores it."""
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group_size if self.strategy == "group" else None,
            "dynamic": False,
        }


@dataclass(frozen=True)
class ActivationFormat:
    """How activations (M, K) are quantized before the product; `a16` means they are not.

    kind: a16, int8, int4 or fp8 (e4m3). dynamic: the scale comes from the data of the call.
    strategy: `token` (one scale a row), `tensor`, or `group` with group_size columns a scale.
    """

    kind: ActivationKind = "a16"
    symmetric: bool = True
    dynamic: bool = True
    strategy: Literal["tensor", "token", "group"] = "token"
    group_size: int = -1

    def __post_init__(self) -> None:
        if self.kind not in _ACTIVATION_KINDS:
            raise FormatError(f"kind: {self.kind!r} is not one of {', '.join(_ACTIVATION_KINDS)}")
        if not isinstance(self.symmetric, bool):
            raise FormatError(f"symmetric: {self.symmetric!r} is not true or false")
        if not isinstance(self.dynamic, bool):
            raise FormatError(f"dynamic: {self.dynamic!r} is not true or false")
        if self.strategy not in _ACTIVATION_STRATEGIES:
            raise FormatError(
                f"strategy: {self.strategy!r} is not one of {', '.join(_ACTIVATION_STRATEGIES)}"
            )
        if self.strategy == "token" and not self.dynamic:
            raise FormatError(
                "dynamic: a scale per token is only known when the call is made; set it to true"
            )
        _check_group_size(self.group_size)
        if (self.group_size > 0) != (self.strategy == "group"):
            raise FormatError(f"group_size: {self.group_size} does not fit strategy {self.strategy!r}")

    @property
    def name(self) -> str:
        """As case ids spell it: `a16`, `a-int8`, `a-fp8-g128`, `a-fp8-static`."""
        if self.kind == "a16":
            return "a16"
        parts = ["a", self.kind]
        if not self.symmetric:
            parts.append("asym")
        if not self.dynamic:
            parts.append("static")
        elif self.strategy == "group":
            parts.append(f"g{self.group_size}")
        elif self.strategy == "tensor":
            parts.append("tensor")
        return "-".join(parts)

    @classmethod
    def from_quantization_args(cls, args: Mapping[str, Any] | None) -> ActivationFormat:
        """Read the `input_activations` part of a config group; None means 16-bit activations (C20)."""
        if args is None:
            return cls()
        _check_args(args, "input_activations")
        bits, kind = args.get("num_bits", 8), args.get("type", "int")
        kinds: dict[str, ActivationKind] = {"8 int": "int8", "4 int": "int4", "8 float": "fp8"}
        found = kinds.get(f"{bits} {kind}")
        if found is None:
            raise FormatError(
                f"num_bits, type: {bits} bits of {kind!r} is none of int 8, int 4 or float 8 activations"
            )
        size, strategy = _span(args)
        return cls(found, args.get("symmetric", True), args.get("dynamic", False), strategy, size)

    def to_quantization_args(self) -> dict[str, Any] | None:
        """The `input_activations` part of a config group, or None for 16-bit activations."""
        if self.kind == "a16":
            return None
        return {
            "num_bits": 4 if self.kind == "int4" else 8,
            "type": "float" if self.kind == "fp8" else "int",
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group_size if self.strategy == "group" else None,
            "dynamic": self.dynamic,
        }


def _check_group_size(size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < -1 or size == 0:
        raise FormatError(
            f"group_size: {size!r} is neither a positive number of columns nor -1 (one scale per row)"
        )


def _check_args(args: Mapping[str, Any], part: str) -> None:
    if not isinstance(args, Mapping):
        raise FormatError(f"{part}: {args!r} is not a mapping of quantization arguments")
    unknown = sorted(set(args) - _KNOWN_ARGS - _IGNORED_ARGS)
    if unknown:
        raise FormatError(f"{part}: unknown field {unknown[0]!r}; known: {', '.join(sorted(_KNOWN_ARGS))}")


def _span(args: Mapping[str, Any]) -> tuple[int, Any]:
    """group_size and strategy, each inferred from the other as compressed-tensors does."""
    size, strategy = args.get("group_size"), args.get("strategy")
    if size is not None:
        _check_group_size(size)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    return -1 if size is None else size, strategy


def _require(args: Mapping[str, Any], field: str, allowed: tuple[Any, ...], default: Any, why: str) -> None:
    value = args.get(field, default)
    if value not in allowed:
        raise FormatError(f"{field}: {value!r} is not supported: {why}")
