"""Correct quantized linears and quantizers, each with an arithmetic of its own.

They compute in genuine float32, float16 and bfloat16; of the oracle they use what reads a checkpoint and nothing that
computes. tools/correct_kernels.py asks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from conformance.backend import Checkpoint, Support
from conformance.cases import Case
from reference.bounds import Contract
from reference.formats import ActivationFormat, WeightFormat
from reference.layouts import layout
from reference.rounding import float_format

Array = npt.NDArray[Any]
F32, F64 = np.float32, np.float64
E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = {"int8": F32(127), "int4": F32(7), "fp8": F32(448)}
FP8_FLOOR = F32(1 / (448 * 512))
FLOAT32_ORDERS = ("sequential", "permuted", "pairwise", "lanes", "blas")
EITHER = (False, True)

# What a correct kernel may choose; what stands there twice is chosen twice as often.
CHOICES: dict[str, Sequence[Any]] = {
    # the accumulation of products
    "order": (*FLOAT32_ORDERS, "tensor", "tensor", "tensor"),
    "lanes": (2, 4, 8, 32),
    "block": (4, 8, 16),  # products that a tensor core adds at a time
    "fraction": (23, 24, 25),  # bits that it keeps below the largest exponent
    "hopper": ("fp32", "e8m13", "e8m13/128"),  # tensor cores of fp8
    "fused": EITHER,  # a product and an addition with one rounding
    "split": ("none", "split-k", "stream-k"),
    "parts": range(2, 17),
    "join": ("ascending", "shuffled", "tree"),  # of parts and of groups
    # the operands
    "weights": ("exact", "rounded", "any"),
    "rounded": ((False, False), (False, True), (True, False), (True, True)),  # 16-bit, quantized activations
    "scale": ("weight", "group"),  # each weight is scaled in float32, or the sum of a group is
    "late": EITHER,  # the zero point is subtracted from the sum of a group
    "stored": EITHER,  # codes as they are stored, or signed
    "fold": ("codes", "first", "scales", "last"),  # what the activation scale meets, or when
    "int32": (True, True, True, False),  # sums of integers are exact inside a group
    "integer_zeros": EITHER,  # and so is a late zero point
    "integers": ("int32", "int32", "int32", "fp32"),
    # the quantizer
    "quantizer": ("kernel", "kernel", "compressed-tensors"),
    "scale_by": ("divide", "reciprocal"),
    "code_by": ("divide", "reciprocal", "inverse"),
    "quotient16": EITHER,  # compressed-tensors divides in the dtype of x
    "floor": EITHER,  # vLLM's, of fp8 scales
    "zero_scale": (0.0, 1.0, 2.0**-20),
    # outside the default class
    "outside": ("",) * 9 + ("epilogue", "partial sums", "epilogue, partial sums", "zero point"),
    "epilogue": ("16-bit", "16-bit", "any"),
    "sixteen": EITHER,  # of "any": the sum is rounded to 16 bits before channel scale and bias
    "before_scale": EITHER,  # where a row has one scale; without a bias always
    "bias_apart": EITHER,  # added to what is rounded already
    "partial_sums": range(2, 9),
    "zero_fused": EITHER,
}


def drawn(seed: int, **changes: Any) -> SimpleNamespace:
    """One of each of CHOICES, but for the changes, and made consistent."""
    rng = np.random.default_rng(seed)
    how = SimpleNamespace(**{name: of[rng.integers(len(of))] for name, of in CHOICES.items()})
    vars(how).update(changes)
    how.rounded = {"exact": (False, False), "rounded": (True, True)}.get(how.weights, how.rounded)
    how.zero_point = "scaled" if "zero point" in how.outside else "integer"
    how.partial_sums = how.partial_sums if "partial sums" in how.outside else 1
    how.epilogue = how.epilogue if "epilogue" in how.outside else "once"
    how.sixteen = how.epilogue == "16-bit" or (how.epilogue == "any" and how.sixteen)
    if how.rounded[1] or how.zero_point == "scaled":  # no operands of integer or fp8 instructions
        how.int32, how.hopper = False, "fp32"
    how.integers = how.integers if how.int32 else "fp32"
    return how


def contract_of(how: SimpleNamespace) -> Contract:
    return Contract(
        weights=how.weights, zero_point=how.zero_point, accumulator=how.hopper, integers=how.integers,
        quantizer=how.quantizer, epilogue=how.epilogue, partial_sums=how.partial_sums,
    )  # fmt: skip


# ---- accumulation: sums of products in float32


def multiply_add(a: Array, b: Array, total: Array, fused: bool) -> Array:
    """total + a * b, rounded once or twice. A product of two float32 numbers is exact in float64."""
    return (a.astype(F64) * b + total).astype(F32) if fused else total + a * b


def sequential(x: Array, w: Array, fused: bool) -> Array:
    total = np.zeros((len(x), len(w)), F32)
    for k in range(x.shape[1]):
        total = multiply_add(x[:, k, None], w[None, :, k], total, fused)
    return total


def pairwise(x: Array, w: Array) -> Array:
    k = x.shape[1]
    if k == 1:
        return x * w.T
    half = k // 2
    return pairwise(x[:, :half], w[:, :half]) + pairwise(x[:, half:], w[:, half:])


def tensor_core(x: Array, w: Array, block: int, fraction: int, bits: int = 24, promote: int = 0) -> Array:
    """Exact products and the accumulator are aligned to the largest exponent among them, cut off `fraction`
    bits below it and added; the accumulator is cut to `bits` significant bits. promote: columns after which
    it moves to float32. The exponent of a product is the sum of its operands' (MMA-Sim)."""
    x, w = x.astype(F64), w.astype(F64)
    least = 2.0**-6 if fraction == 13 else 0.0  # subnormal numbers of e4m3 are not normalized
    x_power, w_power = (np.where(v == 0, 0.0, np.maximum(power_below(v), least)) for v in (x, w))
    total = np.zeros((len(x), len(w)))
    promoted = np.zeros(total.shape, F32)
    cut = np.int64(53 - bits)
    for start in range(0, x.shape[1], block):
        columns = range(start, min(start + block, x.shape[1]))
        top = power_below(total)
        for k in columns:
            np.maximum(top, x_power[:, k, None] * w_power[None, :, k], out=top)
        unit = np.where(top == 0, 1.0, top * 2.0**-fraction)
        inverse = 1 / unit
        steps = np.trunc(total * inverse)
        for k in columns:
            steps += np.trunc(x[:, k, None] * w[None, :, k] * inverse)
        total = ((steps * unit).view(np.int64) >> cut << cut).view(F64)
        if promote and (start + block) % promote == 0:
            promoted = promoted + total.astype(F32)
            total = np.zeros_like(total)
    return promoted + total.astype(F32)


def power_below(v: Array) -> Array:
    """The largest power of two not above |v|; 0 for 0."""
    return (v.view(np.int64) & np.int64(0x7FF0000000000000)).view(F64)


def tree(parts: Sequence[Array]) -> Array:
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]


def joined(
    parts: list[Array], how: SimpleNamespace, rng: np.random.Generator, factors: list[Array] | None = None
) -> Array:
    """The sum of the parts, each multiplied with its factor first."""
    if factors and not (how.fused and how.join != "tree"):
        parts, factors = [p * f for p, f in zip(parts, factors, strict=True)], None
    if how.join == "tree":
        return tree(parts)
    order = rng.permutation(len(parts)) if how.join == "shuffled" else range(len(parts))
    total = np.zeros_like(parts[0])
    for i in order:
        total = multiply_add(parts[i], factors[i], total, True) if factors else total + parts[i]
    return total


def core(how: SimpleNamespace, hopper: bool) -> Callable[[Array, Array], Array]:
    """The innermost accumulation, which nothing splits."""
    if hopper:
        promote = 128 if how.hopper == "e8m13/128" else 0
        return lambda x, w: tensor_core(x, w, 32, 13, 14, promote)
    if how.order == "tensor":
        return lambda x, w: tensor_core(x, w, how.block, how.fraction)
    if how.order == "pairwise":
        return pairwise
    if how.order == "blas":
        return lambda x, w: x @ w.T
    if how.order == "lanes":
        every = [slice(i, None, how.lanes) for i in range(how.lanes)]
        return lambda x, w: tree([sequential(x[:, i], w[:, i], how.fused) for i in every])
    return lambda x, w: sequential(x, w, how.fused)


def accumulate(
    x: Array, w: Array, how: SimpleNamespace, rng: np.random.Generator, hopper: bool = False
) -> Array:
    k, inner = x.shape[1], core(how, hopper)
    if how.order == "permuted":
        order = rng.permutation(k)
        x, w = x[:, order], w[:, order]
    if how.split == "none" or k <= how.parts:
        return inner(x, w)
    if how.split == "split-k":
        even = np.array_split(np.arange(k), how.parts)
        return joined([inner(x[:, c], w[:, c]) for c in even], how, rng)
    tiles = []  # stream-K: workers end where their share of the work does, elsewhere in each tile of outputs
    for rows in np.array_split(np.arange(len(w)), -(-len(w) // 32)):
        cuts = np.sort(rng.choice(np.arange(1, k), how.parts - 1, replace=False))
        uneven = np.split(np.arange(k), cuts)
        tiles.append(joined([inner(x[:, c], w[np.ix_(rows, c)]) for c in uneven], how, rng))
    return np.concatenate(tiles, axis=1)


# ---- the quantizer


def quantize(
    how: SimpleNamespace, x: Array, fmt: ActivationFormat, input_scale: float | None
) -> tuple[Array, Array, Array | None]:
    """Codes and scales in float32, and zero points of an asymmetric format."""
    if not fmt.symmetric:
        return _quantize_asymmetric(how, x)
    kernel = how.quantizer == "kernel"
    kind = np.dtype(F32) if kernel else x.dtype
    q = LARGEST[fmt.kind].astype(kind) + kind.type(0 if kernel or fmt.kind == "fp8" else 0.5)
    m, k = x.shape
    size = fmt.group_size if fmt.strategy == "group" else k
    rows = (1, 1, m * k) if fmt.strategy == "tensor" else (m, k // size, size)
    largest = np.abs(x).astype(kind).reshape(rows).max(axis=2, initial=0)
    if input_scale is not None:
        scale = np.full((1, 1), input_scale, F32)
    elif kernel and how.scale_by == "reciprocal":
        scale = largest * (kind.type(1) / q)
    else:
        scale = largest / q
    floor = kernel and how.floor and fmt.kind == "fp8" and fmt.strategy == "token"
    if floor:
        scale = np.maximum(scale, FP8_FLOOR)
    divided = np.where(scale == 0, kind.type(1), scale)  # what is divided by it is zero
    if kernel and how.code_by == "reciprocal":
        factor = F32(1) / divided
    elif kernel and how.code_by == "inverse" and input_scale is None:
        factor = q / np.where(largest == 0, F32(1), largest)
        if floor:
            factor = np.minimum(factor, F32(1) / FP8_FLOOR)
    else:
        factor = None
    zero = kind.type(how.zero_scale) if kernel else ml_dtypes.finfo(kind).eps
    scale = np.where(scale == 0, zero, scale).astype(F32)
    values = x.astype(F32)
    if factor is not None:
        t = values * _per_column(factor, size, x)
    else:
        t = values / _per_column(divided.astype(F32), size, x)
        if not kernel and how.quotient16 and input_scale is None:
            t = t.astype(kind).astype(F32)
    low = {"int8": -128, "int4": -8, "fp8": -448}[fmt.kind]
    t = np.clip(t, F32(low), LARGEST[fmt.kind])
    codes = t.astype(E4M3).astype(F32) if fmt.kind == "fp8" else np.rint(t)
    return codes, scale, None


def operand(how: SimpleNamespace, x: Array, fmt: ActivationFormat) -> tuple[Array, Array | None]:
    """What the products are taken of, in float32, and the scale of it where x is quantized."""
    if fmt.kind == "a16":
        return x.astype(F32), None
    return quantize(how, x, fmt, None)[:2]


def _per_column(values: Array, size: int, x: Array) -> Array:
    return np.repeat(values, size, axis=1) if values.shape[1] * size == x.shape[1] else values


def _quantize_asymmetric(how: SimpleNamespace, x: Array) -> tuple[Array, Array, Array | None]:
    kernel = how.quantizer == "kernel"
    kind = np.dtype(F32) if kernel else x.dtype
    values = x.astype(kind)
    least, greatest = (f(axis=1, keepdims=True) for f in (values.min, values.max))
    if not kernel:
        least, greatest = np.minimum(least, kind.type(0)), np.maximum(greatest, kind.type(0))
    steps, low = kind.type(255), kind.type(-128)
    span = greatest - least
    by_reciprocal = kernel and how.scale_by == "reciprocal"
    scale = span * (kind.type(1) / steps) if by_reciprocal else span / steps
    zero = kind.type(how.zero_scale or 1) if kernel else ml_dtypes.finfo(kind).eps
    scale = np.where(scale == 0, zero, scale)
    if not kernel:
        zero = low - least / scale
        quotient = kind if how.quotient16 else np.dtype(F32)
        zero = np.rint(np.clip(zero.astype(F32), F32(-128), F32(127)))
        t = values.astype(quotient) / scale.astype(quotient) + zero.astype(quotient)
        return np.rint(np.clip(t.astype(F32), F32(-128), F32(127))), scale.astype(F32), zero
    inverse = F32(1) / scale
    zero = np.rint(low - (least * inverse if how.code_by == "reciprocal" else least / scale))
    t = values / scale if how.code_by == "divide" else values * inverse
    return np.clip(np.rint(t) + zero, F32(-128), F32(127)), scale, zero


# ---- the kernel


class CorrectKernel:
    """The backend of a seed. changes: to what is drawn."""

    arrays = "numpy"

    def __init__(self, seed: int, **changes: Any) -> None:
        self.name, self.seed = f"correct-{seed}", seed
        self.how = drawn(seed, **changes)
        self.contract = contract_of(self.how)

    def supports(self, case: Case) -> Support:
        unscaled = self.how.sixteen and (
            case.weight.strategy == "channel" or case.weight.group_size == case.k
        )
        large = case.recipe == "integers" and self.how.partial_sums > 1
        large |= unscaled and case.recipe in ("integers", "magnitudes", "trained")
        if case.operation == "linear" and case.dtype == "fp16" and large:
            return Support.no("a sum may be too large for float16 where the output is not")
        return Support.yes()

    def dequantize(self, checkpoint: Checkpoint) -> Array:
        dtype = checkpoint.tensors["weight_scale"].dtype
        layer = Layer(self, replace(checkpoint, dtype=float_format(dtype).name), self.how)
        return layer.exact().astype(dtype)

    def quantize_activation(self, x: Array, args: Any, input_scale: float | None) -> Sequence[Array]:
        fmt = ActivationFormat.from_quantization_args(args)
        codes, scale, zero = quantize(self.how, x, fmt, input_scale)
        found = [codes.astype(E4M3 if fmt.kind == "fp8" else np.int8), scale]
        return found if zero is None else [*found, zero.astype(np.int32)]

    def load_linear(self, checkpoint: Checkpoint) -> Callable[[Array], Array]:
        return Layer(self, checkpoint, self.how)

    def accumulation(self, weight: WeightFormat, activation: ActivationFormat) -> str:
        """What sums the products of a layer."""
        how = self.how
        if activation.kind in ("int8", "int4") and how.int32:
            return "int32"
        if activation.kind == "fp8" and how.hopper != "fp32":
            # e4m3 holds all integers up to 16: wider codes are operands of 16 bits.
            differences = weight.offset if weight.symmetric else (1 << weight.bits) - 1
            late = (1 << weight.bits) - 1 if how.stored else weight.offset
            if (late if how.late else differences) <= 16:
                return how.hopper
        return how.order

    def kind(self, case: Case) -> str:
        """What its figures are counted under: the accumulation, or what sets it outside the default class."""
        how = self.how
        if case.operation != "linear":
            return f"quantizer, {how.quantizer}"
        outside = {
            "16-bit epilogue": how.sixteen,
            "partial sums": how.partial_sums > 1,
            "scaled zero points": how.zero_point == "scaled",
        }
        if any(outside.values()):
            return ", ".join(name for name, is_so in outside.items() if is_so)
        found = self.accumulation(case.weight, case.activation)
        return f"tensor {how.block}/{how.fraction}" if found == "tensor" else found


class Layer:
    def __init__(self, kernel: CorrectKernel, checkpoint: Checkpoint, how: SimpleNamespace) -> None:
        fmt = WeightFormat.from_quantization_args(checkpoint.weights)
        weight = layout("ct-dense-le-v1").decode(checkpoint.tensors, fmt)
        self.activation = ActivationFormat.from_quantization_args(checkpoint.input_activations)
        self.dtype = float_format(checkpoint.dtype).dtype
        self.how, self.rng = how, np.random.default_rng([kernel.seed, weight.n, weight.k])
        offset = fmt.offset if how.stored else 0
        self.codes = weight.codes.astype(F32) + F32(offset)
        zeros = np.zeros(weight.scale.shape) if weight.zero_point is None else weight.zero_point
        self.zeros, self.scale = zeros.astype(F32) + F32(offset), weight.scale.astype(F32)
        self.groups = weight.groups()
        bias = checkpoint.tensors.get("bias")
        self.bias = None if bias is None else bias.astype(F32)
        self.accumulation = kernel.accumulation(fmt, self.activation)
        channel = fmt.strategy == "channel"
        before = how.before_scale or (channel and bias is None)
        one_scale = channel or weight.scale.shape[1] == 1
        self.unscaled = how.sixteen and one_scale and before  # until after the rounding to 16 bits
        self.on_tensor_cores = self.accumulation not in FLOAT32_ORDERS
        self.matrix = self._matrix()

    def _matrix(self) -> Array | None:
        """The operand where weights are scaled one by one; None where sums are."""
        how = self.how
        if self.unscaled:
            return None
        if how.zero_point == "scaled":
            late = self.half(self.zeros * self.scale)[:, self.groups]
            early = self.codes * self.scale[:, self.groups]
            return self.half((early if how.zero_fused else self.half(early)) - late)
        if how.rounded[self.activation.kind != "a16"]:
            return self.half(self.exact())
        whole = how.scale == "weight" and not how.late and not self.on_tensor_cores
        return self.exact() if whole else None

    def exact(self) -> Array:
        """Nine bits times eleven: no rounding."""
        return (self.codes - self.zeros[:, self.groups]) * self.scale[:, self.groups]

    def half(self, values: Array) -> Array:
        """Rounded to 16 bits: once, for values of float32."""
        with np.errstate(over="ignore"):
            return values.astype(self.dtype).astype(F32)

    def __call__(self, x: Array) -> Array:
        values, scale = operand(self.how, x, self.activation)
        return self.half(self.product(values, scale)).astype(self.dtype)

    def product(self, values: Array, scale: Array | None) -> Array:
        """All but the last rounding, in float32."""
        how = self.how
        if scale is not None and how.fold == "codes" and not self.on_tensor_cores:
            values, scale = values * scale, None
        parts = np.array_split(np.arange(values.shape[1]), min(how.partial_sums, values.shape[1]))
        sums = [self._sum(values, scale, part) for part in parts]
        bias = self.bias
        if len(sums) > 1:
            if bias is not None and not (how.bias_apart or how.sixteen):
                sums[0], bias = sums[0] + bias, None
            total = self.half(sums[0])
            for other in sums[1:]:
                total = self.half(total + self.half(other))
        else:
            total = self.half(sums[0]) if how.sixteen else sums[0]
        if self.unscaled:
            factor = self.scale.T  # (1, N)
            if bias is not None and not how.bias_apart:
                return rounded_once(total.astype(F64) * factor + bias, self.dtype).astype(F32)
            total = self.half(total * factor)
        return total if bias is None else total + bias

    def _sum(self, x: Array, scale: Array | None, columns: Array) -> Array:
        """The product over some columns in float32, scaled (but for `unscaled`)."""
        how = self.how
        if self.matrix is not None:
            total = self._products(x[:, columns], self.matrix[:, columns])
            return total if scale is None else total * scale
        parts, factors = [], []
        for group in np.unique(self.groups[columns]):
            here = columns[self.groups[columns] == group]
            part, factor = self._group(x[:, here], here, group)
            if scale is not None and how.fold == "first":
                part = part * scale
            elif scale is not None and how.fold == "scales":
                factor = scale * factor
            parts.append(part)
            factors.append(factor)
        total = joined(parts, how, self.rng, factors)
        return total * scale if scale is not None and how.fold in ("last", "codes") else total

    def _group(self, x: Array, here: Array, group: int) -> tuple[Array, Array]:
        """The sum of a group, and what is left to multiply it with."""
        how, one = self.how, np.ones((1, 1), F32)
        codes, zeros, scale = self.codes[:, here], self.zeros[:, group], self.scale[:, group]
        factor = one if self.unscaled else scale[None, :]
        if self.accumulation == "int32":
            sums, row = x.astype(F64) @ codes.T.astype(F64), x.sum(axis=1, keepdims=True, dtype=F64)
            if how.late and not how.integer_zeros:
                return sums.astype(F32) - row.astype(F32) * zeros, factor
            return (sums - row * zeros).astype(F32), factor
        if not how.late:
            return self._products(x, codes - zeros[:, None]), factor
        if how.scale == "weight" and not self.unscaled and not self.on_tensor_cores:
            codes, zeros, factor = codes * scale[:, None], zeros * scale, one
        sums, row = self._products(x, codes), x.sum(axis=1, keepdims=True, dtype=F32)
        return multiply_add(-row, zeros[None, :], sums, how.fused), factor

    def _products(self, x: Array, w: Array) -> Array:
        return accumulate(x, w, self.how, self.rng, self.accumulation.startswith("e8m13"))


def rounded_once(values: Array, dtype: np.dtype[Any]) -> Array:
    """float64 to 16 bits with one rounding: through float32 rounded to odd, which keeps ties apart."""
    near = values.astype(F32)
    toward = np.where(np.abs(near.astype(F64)) > np.abs(values), np.nextafter(near, F32(0)), near)
    odd = np.where(near == values, near, (toward.view(np.int32) | 1).view(F32))
    with np.errstate(over="ignore"):
        return odd.astype(dtype)
