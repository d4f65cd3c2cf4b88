"""The dense matrix: packing, dequantize, the quantized linear, the quantizers, bad data.

What is not here: tensor-wise weights, float32 activations.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.cases.case import DEFECTS, DTYPES, NO_WEIGHT, Case
from reference.formats import ActivationFormat, WeightFormat

BITS = (2, 3, 4, 5, 6, 7, 8)
GROUP_SIZES = (-1, 32, 128)

# (M, N, K). A group takes the shapes whose K it divides; a channel takes them all.
LINEAR_SHAPES = (
    # K a multiple of 128: every format
    (1, 64, 128),
    (2, 96, 256),
    (7, 64, 384),
    (16, 128, 512),
    (17, 160, 640),
    (64, 256, 256),
    (257, 64, 128),
    # N and K no multiple of 64, or of 32: groups of 32, and channels
    (1, 100, 96),
    (7, 33, 32),
    (17, 72, 544),
    (64, 64, 160),
    # K * bits no multiple of 32, K smaller than any tile: channels
    (1, 10, 250),
    (7, 64, 33),
    (16, 96, 5),
    (17, 130, 272),
)
EMPTY_SHAPE = (0, 64, 128)
# Small, odd and large: where a path of its own begins, ranges are tried as well
MAGNITUDE_SHAPES = ((7, 64, 384), (17, 72, 544), (17, 130, 272))
# (N, K) whose whole matrix is read out through the kernel, one column a row of x
READOUT_SHAPES = ((64, 64), (160, 384), (72, 544), (130, 272), (10, 250))
DEQUANTIZE_SHAPES = ((64, 128), (160, 384), (33, 32), (7, 64), (72, 544), (10, 250), (96, 5), (130, 272))
# (experts or 0, N, K)
PACKING_SHAPES = ((0, 1, 1), (0, 7, 31), (0, 4, 32), (0, 10, 33), (0, 16, 250), (0, 64, 256), (3, 10, 33))

# recipe -> with bias too
LINEAR_RECIPES = {"identity": False, "scales": False, "integers": True, "random": True, "trained": False}
# Every sum is exact in float32 (C42)
EXACT_RECIPES = ("identity", "integers", "magnitudes", "empty")
# With quantized activations a cell takes turns over the shapes: recipe -> how many it meets
QUANTIZED_RECIPES = {"identity": 1, "scales": 1, "integers": 3, "random": 3, "trained": 1, "magnitudes": 1}
QUANTIZED_ACTIVATIONS = (ActivationFormat("int8"), ActivationFormat("int4"), ActivationFormat("fp8"))

# Formats of the quantizer alone
QUANTIZER_FORMATS = (
    *QUANTIZED_ACTIVATIONS,
    ActivationFormat("fp8", dynamic=False, strategy="tensor"),
    ActivationFormat("fp8", strategy="group", group_size=128),
    ActivationFormat("int8", symmetric=False),
)
# (M, K)
QUANTIZER_SHAPES = (
    (1, 128),
    (7, 256),
    (17, 640),
    (64, 384),
    (33, 1024),
    (257, 128),
    (5, 33),
    (3, 1),
    (0, 128),
)
# recipe -> the formats that it does not fit
QUANTIZER_RECIPES = {
    "random": (),
    "outliers": (),
    "codes": ("a-int8-asym",),
    "ties": ("a-int8-asym",),
    "zero-tokens": (),
    "magnitudes": ("a-fp8-static",),
    "one-sided": (),
    "saturation": ("a-int8", "a-int4", "a-fp8", "a-fp8-g128", "a-int8-asym"),
}
PACKING_RECIPES = ("ramp", "onehot", "extremes", "uniform")


def dense_cases() -> Iterator[Case]:
    yield from _packing()
    yield from _dequantize()
    yield from _activation_quantization()
    yield from _linear()
    yield from _validation()


def weight_formats() -> Iterator[WeightFormat]:
    """bits x group size x symmetry."""
    for bits in BITS:
        for group_size in GROUP_SIZES:
            for symmetric in (True, False):
                yield WeightFormat.of(bits, group_size, symmetric)


def _fits(fmt: WeightFormat, k: int) -> bool:
    return fmt.strategy != "group" or k % fmt.group_size == 0


def _packing() -> Iterator[Case]:
    for bits in (1, *BITS):
        fmt = WeightFormat.of(bits, -1, True)
        for experts, n, k in PACKING_SHAPES:
            for dim in (0, 1):
                for recipe in PACKING_RECIPES:
                    quick = (n, k) == (10, 33)
                    yield Case("packing", fmt, recipe, n, k, experts=experts, dim=dim, quick=quick)


def _dequantize() -> Iterator[Case]:
    for dtype in DTYPES:
        for fmt in weight_formats():
            shapes = [shape for shape in DEQUANTIZE_SHAPES if _fits(fmt, shape[1])]
            for n, k in shapes:
                yield Case("dequantize", fmt, "uniform", n, k, dtype=dtype, quick=(n, k) == shapes[-1])
            if fmt.group_size == 128:
                yield Case("dequantize", fmt, "uniform", 64, 384, dtype=dtype, act_order=True, quick=True)


def _activation_quantization() -> Iterator[Case]:
    for dtype in DTYPES:
        for turn, fmt in enumerate(QUANTIZER_FORMATS):
            # A constant token has no defined scale in an asymmetric format (C66).
            shapes = [
                (m, k)
                for m, k in QUANTIZER_SHAPES
                if k % max(fmt.group_size, 1) == 0 and (fmt.symmetric or k > 1)
            ]
            recipes = [r for r, unfit in QUANTIZER_RECIPES.items() if fmt.name not in unfit]
            for r, recipe in enumerate(recipes):
                for i, (m, k) in enumerate(shapes):
                    quick = i in ((turn + r) % len(shapes), (turn + r + 3) % len(shapes))
                    yield Case("activation_quantization", NO_WEIGHT, recipe, 0, k, m, dtype, fmt, quick=quick)


def _linear() -> Iterator[Case]:
    formats = [(dtype, fmt) for dtype in DTYPES for fmt in weight_formats()]
    for turn, (dtype, fmt) in enumerate(formats):
        yield from _linear_cell(turn, dtype, fmt)
    for activation in QUANTIZED_ACTIVATIONS:
        for turn, (dtype, fmt) in enumerate(formats):
            yield from _quantized_cell(turn, dtype, fmt, activation)


def _quantized_cell(turn: int, dtype: str, fmt: WeightFormat, activation: ActivationFormat) -> Iterator[Case]:
    shapes = [shape for shape in LINEAR_SHAPES if _fits(fmt, shape[2])]
    for r, (recipe, count) in enumerate(QUANTIZED_RECIPES.items()):
        # With K beyond that the anchor's products make the radius too wide to tell fp8 from no quantization.
        narrow = (recipe, activation.kind) == ("scales", "fp8")
        fitting = [s for s in shapes if s[2] <= 128 and s[0] > 1] if narrow else shapes
        for i in range(count):
            m, n, k = fitting[(turn + 3 * r + 2 * i) % len(fitting)]
            bias = LINEAR_RECIPES.get(recipe, False) and i != 1
            quick = i == 0 and recipe != "scales"
            yield Case("linear", fmt, recipe, n, k, m, dtype, activation, bias, quick=quick)
    readouts = [shape for shape in READOUT_SHAPES if _fits(fmt, shape[1])]
    n, k = readouts[turn % len(readouts)]
    yield Case("linear", fmt, "identity", n, k, k, dtype, activation)
    yield Case("linear", fmt, "zero-scale", 64, 384, 7, dtype, activation)
    m, n, k = EMPTY_SHAPE
    yield Case("linear", fmt, "empty", n, k, m, dtype, activation)
    if fmt.group_size == 128:
        for recipe in ("integers", "random"):
            quick = recipe == "integers" or dtype == "bf16"
            yield Case("linear", fmt, recipe, 64, 384, 17, dtype, activation, act_order=True, quick=quick)


def _linear_cell(turn: int, dtype: str, fmt: WeightFormat) -> Iterator[Case]:
    shapes = [shape for shape in LINEAR_SHAPES if _fits(fmt, shape[2])]
    for r, (recipe, with_bias) in enumerate(LINEAR_RECIPES.items()):
        # Cells take turns over the shapes, so that the quick set meets every shape with every recipe.
        chosen = shapes[(turn + 3 * r) % len(shapes)]
        for m, n, k in shapes:
            for bias in (False, True) if with_bias else (False,):
                quick = (m, n, k) == chosen and bias == (with_bias and turn % 2 == 0)
                yield Case("linear", fmt, recipe, n, k, m, dtype, bias=bias, quick=quick)
    readouts = [shape for shape in READOUT_SHAPES if _fits(fmt, shape[1])]
    for n, k in readouts:
        quick = (n, k) == readouts[turn % len(readouts)]
        yield Case("linear", fmt, "identity", n, k, k, dtype, quick=quick)
    magnitudes = [shape for shape in MAGNITUDE_SHAPES if _fits(fmt, shape[2])]
    for i, (m, n, k) in enumerate(magnitudes):
        yield Case("linear", fmt, "magnitudes", n, k, m, dtype, quick=i == turn % len(magnitudes))
    yield Case("linear", fmt, "zero-scale", 64, 384, 7, dtype, quick=dtype == "bf16")
    m, n, k = EMPTY_SHAPE
    yield Case("linear", fmt, "empty", n, k, m, dtype, quick=dtype == "bf16")
    if fmt.group_size == 128:
        for recipe in LINEAR_RECIPES:
            yield Case("linear", fmt, recipe, 64, 384, 17, dtype, act_order=True, quick=True)
        # Kernels with tiles of 128 outputs have not been asked yet.
        yield Case("linear", fmt, "integers", 128, 384, 17, dtype, act_order=True, quick=turn % 5 == 0)


def _validation() -> Iterator[Case]:
    for bits in BITS:
        fmt = WeightFormat.of(bits, 32, False)
        for defect in DEFECTS:
            if defect == "code-range" and bits == 8:
                continue  # every byte is a code of 8 bits
            yield Case("validation", fmt, defect, 16, 96, quick=True)
