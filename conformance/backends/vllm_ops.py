"""vLLM's CUDA operators without vLLM: where its compiled libraries lie, and what the adapters around them share.

Two extension libraries register the operators under torch.ops._C and torch.ops._moe_C when they are loaded; the package
itself would bring a serving engine with it. What the adapters say of operators was read in vllm 0.26.0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.backends.cuda import require
from conformance.backends.torch_weights import TorchWeight
from conformance.cases import Case
from conformance.errors import EnvironmentMissing
from reference.formats import ActivationFormat, WeightFormat
from reference.sharding import Ranks

_T = TypeVar("_T")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Packages that hold the libraries, and the distributions that install them: vLLM, or a wheel of the libraries alone.
_PACKAGES = {"vllm": "vllm", "vllm_ops_sm90": "vllm-ops-sm90"}
_LIBRARIES = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch")


def load(names: Sequence[str], capability: tuple[int, int] = (8, 0), newest: int | None = None) -> str:
    """Register the operators; the distribution that they come from. names: what the caller needs, `_C.marlin_gemm`.

    capability, newest: as for `cuda.require`. Raises EnvironmentMissing: no such GPU, vLLM absent or not loadable, or
    of a version without one of the operators.
    """
    require("torch", "vLLM", capability, newest)
    distribution = next((name for package, name in _PACKAGES.items() if _register(package)), None)
    if distribution is None:
        raise EnvironmentMissing("vllm is not installed: pip install vllm")
    for name in names:
        namespace, _, operator = name.partition(".")
        if not hasattr(getattr(torch.ops, namespace), operator):
            raise EnvironmentMissing(
                f"the operators of {distribution} have no {name}: another version of vllm"
            )
    return distribution


def _register(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = [path for name in _LIBRARIES for folder in folders for path in sorted(folder.glob(f"{name}.*so"))]
    for path in found:
        try:
            torch.ops.load_library(path)
        except OSError as error:
            why = error.__cause__ or error
            raise EnvironmentMissing(
                f"{package}: {path.name} cannot be loaded by this torch: {why}"
            ) from error
    return bool(found)


def type_id(bits: int, symmetric: bool) -> int:
    """vLLM's ScalarType of stored codes as a number: uint<b>b<2^(b-1)> where the format is symmetric, else uint<b>.

    From the lowest bit: 8 bits of exponent (0: an integer), 8 of mantissa, the sign, 32 of bias, a flag of finite
    values, and how NaN is represented (1, also of integers).
    """
    bias = 1 << (bits - 1) if symmetric else 0
    return bits << 8 | bias << 17 | 1 << 50


# ---- what is asked, and why not


@dataclass(frozen=True)
class Layer:
    """What a layer asks for, as a case tells it beforehand and a checkpoint when it is loaded. shapes: (N, K) of its
    weights. activation: `a16`, `a-int8`, ..."""

    weight: WeightFormat
    activation: str
    dtype: str
    act_order: bool
    bias: bool
    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of_case(cls, case: Case) -> Layer:
        hidden, intermediate = case.k, case.n
        if case.ranks.startswith("tp"):  # a rank has a part of each expert
            intermediate //= Ranks.parse(case.ranks).count
        shapes: tuple[tuple[int, int], ...] = ((case.n, case.k),)
        if case.operation != "linear":
            shapes = ((2 * intermediate, hidden), (hidden, intermediate))
        return cls(case.weight, case.activation.name, case.dtype, case.act_order, case.bias, shapes)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint | MoeCheckpoint) -> Layer:
        names = checkpoint.tensors.keys()
        if isinstance(checkpoint, MoeCheckpoint):
            hidden, intermediate = checkpoint.hidden, checkpoint.intermediate
            shapes: tuple[tuple[int, int], ...] = ((2 * intermediate, hidden), (hidden, intermediate))
        else:
            n, k = checkpoint.tensors["weight_shape"].tolist()
            shapes = ((n, k),)
        return cls(
            WeightFormat.from_quantization_args(checkpoint.weights),
            ActivationFormat.from_quantization_args(checkpoint.input_activations).name,
            checkpoint.dtype,
            any(name.endswith("weight_g_idx") for name in names),
            any(name.endswith("bias") for name in names),
            shapes,
        )

    @property
    def group_size(self) -> int:
        """Columns a scale, -1 for one scale a row."""
        return self.weight.group_size

    def divides(self, n: int, k: int) -> bool:
        """Whether every N is a multiple of n and every K of k."""
        return all(rows % n == 0 and columns % k == 0 for rows, columns in self.shapes)


def first_reason(*checks: tuple[bool, str]) -> str:
    """The reason of the first check that is met; empty: none is."""
    return next((reason for met, reason in checks if met), "")


class Operators:
    """The common part of the adapters of matrix products: one list of reasons, asked beforehand and when a layer is
    loaded. What an adapter has of `load_linear` and `load_moe`, it defines itself."""

    device = "cuda"

    def __init__(self, distribution: str) -> None:
        self.libraries = (distribution,)

    def declined(self, layer: Layer) -> str:
        """Why not, in one sentence; empty: the operators do it."""
        raise NotImplementedError

    def supports(self, case: Case) -> Support:
        if case.operation not in ("linear", "moe", "moe_parallel"):
            return Support.no("only layers: vLLM's operators do not look for bad data")
        if not hasattr(self, "load_linear" if case.operation == "linear" else "load_moe"):
            return Support.no("no dense layers" if case.operation == "linear" else "no experts")
        reason = self.declined(Layer.of_case(case))
        return Support.no(reason) if reason else Support.yes()

    def refuse(self, checkpoint: Checkpoint | MoeCheckpoint) -> Layer:
        """What the checkpoint asks for. Raises NotImplementedError for what is declined."""
        layer = Layer.of_checkpoint(checkpoint)
        reason = self.declined(layer)
        if reason:
            raise NotImplementedError(reason)
        return layer


# ---- what the adapters call


def column_order(weight: TorchWeight) -> torch.Tensor | None:
    """int32 (K): the columns of an act-order group by group, None without one. Raises NotImplementedError where groups
    are not all of one size, for the operators count columns to find a group."""
    if weight.group is None:
        return None
    order = torch.argsort(weight.group, stable=True)
    if not torch.equal(
        weight.group[order], torch.arange(len(order), device=order.device) // weight.group_size
    ):
        raise NotImplementedError("weight_g_idx: vLLM's operators need groups of one size each")
    return order.to(torch.int32)


def launched(value: _T, device: torch.device) -> _T:
    """The same value, once a kernel of torch has been launched behind it: that reports a launch which CUDA refused.
    vLLM does not look, so that the error of a call with no rows would be met by whoever launches next."""
    torch.ones(1, device=device)
    return value


def quantized_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 (M, K) and scales float32 (M, 1) of x (M, K), one scale a token."""
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):  # what the operator does without rows is judged by itself
        torch.ops._C.dynamic_scaled_int8_quant(codes, x.contiguous(), scale, None)
    return codes, scale


def quantized_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3 (M, K) and scales float32 (M, 1) of x (M, K), one scale a token."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)
    return codes, scale


def aligned(
    ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sorted_ids, expert_ids and num_tokens_post_pad (C77) of ids int32 (T, k), in arrays as long as vLLM makes them:
    every expert may end with a block of one slot, and there are no more blocks than slots."""
    length = ids.numel() + experts * (block - 1)
    if ids.numel() < experts:
        length = min(length, ids.numel() * block)
    sizes: Any = (length, -(-length // block), 1)
    found = tuple(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, *found, expert_map)
    return found[0], found[1], found[2]


def padded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros below and to the right."""
    return torch.nn.functional.pad(values, (0, columns - values.shape[1], 0, rows - values.shape[0]))


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
