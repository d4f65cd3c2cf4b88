"""The matrix as data: what is tested, enumerated once.

A case is one fully determined test. Its id is stable, readable and greppable, and the same everywhere:

    packing/w3/dim1/n7-k250/uniform-0
    dequantize/w3-g128-asym/bf16/n160-k384/uniform-0
    linear/w3-g128-asym/a16/bf16/m17-n72-k544-bias/random-0
    validation/w3-g32-asym/bf16/scale-nan

The cell is the format part of the id. docs/specification.md holds the clauses that cases cite.
What is not here: activation quantization, mixture of experts, tensor-wise weights, float32 activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from reference.formats import ActivationFormat, WeightFormat

BITS = (2, 3, 4, 5, 6, 7, 8)
GROUP_SIZES = (-1, 32, 128)
DTYPES = ("bf16", "fp16")

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
# (N, K) whose whole matrix is read out through the kernel, one column a row of x
READOUT_SHAPES = ((64, 64), (160, 384), (72, 544), (130, 272), (10, 250))
DEQUANTIZE_SHAPES = ((64, 128), (160, 384), (33, 32), (7, 64), (72, 544), (10, 250), (96, 5), (130, 272))
# (experts or 0, N, K)
PACKING_SHAPES = ((0, 1, 1), (0, 7, 31), (0, 4, 32), (0, 10, 33), (0, 16, 250), (0, 64, 256), (3, 10, 33))

# recipe -> with bias too
LINEAR_RECIPES = {"identity": False, "scales": False, "integers": True, "random": True, "trained": False}
PACKING_RECIPES = ("ramp", "onehot", "extremes", "uniform")

# What a backend that claims to validate must refuse -> the clauses that say so
DEFECTS = {
    "code-range": ("C15",),
    "word-count": ("C12", "C13"),
    "zero-words": ("C12", "C17"),
    "scale-nan": ("C25",),
    "scale-inf": ("C25",),
    "scale-shape": ("C21",),
    "group-remainder": ("C21",),
}

_CLAUSES = {
    "packing": ("C10", "C11", "C12", "C13", "C14"),
    "dequantize": ("C1", "C2", "C3", "C4", "C5", "C10", "C20", "C21", "C27"),
    "linear": ("C1", "C2", "C3", "C4", "C5", "C10", "C20", "C21", "C27", "C40", "C41"),
}
_RECIPE_CLAUSES = {
    "identity": ("C42",),
    "scales": ("C42", "C43"),
    "integers": ("C42",),
    "random": ("C44", "C45", "C46"),
    "trained": ("C44", "C45", "C46"),
    "zero-scale": ("C28", "C44", "C45", "C46"),
    "empty": ("C47",),
}


@dataclass(frozen=True)
class Case:
    """One test. m, n, k are its shape, experts the stack of a packed tensor (0: a matrix), dim the packed
    dimension. act_order: a g_idx names the group of each column. quick: it belongs to the quick set."""

    operation: str
    weight: WeightFormat
    recipe: str
    n: int = 0
    k: int = 0
    m: int = 0
    dtype: str = "bf16"
    activation: ActivationFormat = field(default_factory=ActivationFormat)
    bias: bool = False
    act_order: bool = False
    experts: int = 0
    dim: int = 1
    seed: int = 0
    quick: bool = False

    @property
    def cell(self) -> str:
        """The format part of the id, in which capability and coverage are counted."""
        if self.operation == "packing":
            return f"packing/w{self.weight.bits}"
        parts = [self.operation, self.weight.name + ("-gidx" if self.act_order else "")]
        if self.operation == "linear":
            parts.append(self.activation.name)
        return "/".join([*parts, self.dtype])

    @property
    def id(self) -> str:
        if self.operation == "validation":
            return f"{self.cell}/{self.recipe}"
        shape = f"n{self.n}-k{self.k}"
        if self.operation == "packing":
            stack = f"e{self.experts}-" if self.experts else ""
            return f"{self.cell}/dim{self.dim}/{stack}{shape}/{self.recipe}-{self.seed}"
        if self.operation == "linear":
            shape = f"m{self.m}-{shape}{'-bias' if self.bias else ''}"
        return f"{self.cell}/{shape}/{self.recipe}-{self.seed}"

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses of docs/specification.md that the case tests."""
        if self.operation == "validation":
            return DEFECTS[self.recipe]
        found = list(_CLAUSES[self.operation] + _RECIPE_CLAUSES.get(self.recipe, ()))
        if not self.weight.symmetric and self.operation != "packing":
            found.append("C17")
        if self.act_order:
            found.append("C29")
        return tuple(found)


@cache
def all_cases() -> dict[str, Case]:
    """Every case by id, in a stable order. The quick ones judge every cell at least once."""
    cases = [*_packing(), *_dequantize(), *_linear(), *_validation()]
    by_id = {case.id: case for case in cases}
    if len(by_id) != len(cases):
        raise AssertionError("two cases share an id")
    return by_id


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


def _linear() -> Iterator[Case]:
    for turn, (dtype, fmt) in enumerate((d, f) for d in DTYPES for f in weight_formats()):
        yield from _linear_cell(turn, dtype, fmt)


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
    yield Case("linear", fmt, "zero-scale", 64, 384, 7, dtype, quick=dtype == "bf16")
    m, n, k = EMPTY_SHAPE
    yield Case("linear", fmt, "empty", n, k, m, dtype, quick=dtype == "bf16")
    if fmt.group_size == 128:
        for recipe in LINEAR_RECIPES:
            yield Case("linear", fmt, recipe, 64, 384, 17, dtype, act_order=True, quick=True)


def _validation() -> Iterator[Case]:
    for bits in BITS:
        fmt = WeightFormat.of(bits, 32, False)
        for defect in DEFECTS:
            if defect == "code-range" and bits == 8:
                continue  # every byte is a code of 8 bits
            yield Case("validation", fmt, defect, 16, 96, quick=True)
