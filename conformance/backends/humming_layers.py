"""A weight as Humming's kernels read it, loaded from checkpoint tensors, and the call of its GEMM.

Loading is that of serving libraries: both schemas dispatched by their base classes (a subclass's own from_config
ignores what it does not know, the activation quantization with it), converted, padded, transformed. So is the call,
`humming_forward`, which quantizes the activations itself, but for one thing: the library compiles a kernel for every
interval of M that its heuristics tell apart, and here only those that are called.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from conformance.installed import installed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What serving libraries pad a weight to; kernels are compiled for the padded shape.
PAD_N, PAD_K = 256, 128
# int32 numbers by which thread blocks take turns at a tile: as many as in the library's own layer class.
LOCKS = 2048
DENSE = "dense"

Args = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Layer:
    """What a kernel is compiled for: a weight (N, K), or a stack of E > 0, without its numbers.

    weights, activations: QuantizationArgs as pairs of name and value; activations None: 16 bits. gemm: `dense`, or how
    experts are called. form: the checkpoint's format.
    """

    weights: Args
    activations: Args | None
    dtype: str
    n: int
    k: int
    bias: bool = False
    experts: int = 0
    gemm: str = DENSE
    form: str = "pack-quantized"


def arguments(args: Mapping[str, Any] | None) -> Args | None:
    """Without the fields that are null: the library's schemas know what is absent, and stumble over None."""
    return None if args is None else tuple((name, value) for name, value in args.items() if value is not None)


class Library:
    """The parts of the library that are used, and which of its quantizers are compiled."""

    def __init__(self) -> None:
        schema, transform = import_module("humming.schema"), import_module("humming.transform")
        tune, kernel = import_module("humming.tune"), import_module("humming.kernel.process_input")
        self.weight_schema: Any = schema.BaseWeightSchema
        self.input_schema: Any = schema.BaseInputSchema
        self.unquantized: Any = schema.HummingInputSchema
        self.compatible: Any = schema.is_humming_schema_compatible
        self._layer_config: Any = transform.prepare_layer_config
        self.transform: Any = transform.transform_humming_tensors
        self.forward: Any = import_module("humming.forward").humming_forward
        self.ops: Any = import_module("humming.ops")
        self.heuristics_class: Any = tune.get_heuristics_class
        self.heuristics: Any = tune.get_heuristics_config
        self.gemm: Any = import_module("humming.kernel.humming").HummingKernel
        self.data_type: Any = import_module("humming.dtypes").DataType
        self.device: Any = import_module("humming.device").current_device
        self._input_kernel: Any = kernel.ProcessInputKernel
        self._input_problem: Any = import_module("humming.config").ProcessInputProblemConfig
        self._intervals: Any = import_module("humming.tune.process_input").get_process_input_tuning_intervals
        self._runtime: Any = import_module("humming.jit.runtime").KernelRuntime
        self.cache = Path(import_module("humming.utils.jit").get_humming_cache_dir())
        self._covered: dict[Any, list[Any]] = {}
        self._lock = threading.Lock()

    def identity(self) -> list[str]:
        """What its kernels depend on besides their layer and call: what the library's own cache knows them by, its
        settings, and how they are called here. A reinstalled library compiles all anew."""
        compiler = self._runtime._get_compiler()
        flags = compiler.get_flags(str(self.device.sm_version))
        settings = sorted(
            f"{name}={value}" for name, value in os.environ.items() if name.startswith("HUMMING_")
        )
        here = Path(__file__)
        own = (
            here.with_name(name).read_text("utf-8")
            for name in ("humming.py", "humming_experts.py", here.name)
        )
        return [
            torch.cuda.get_device_name(), str(installed("humming-kernels")), compiler.__name__,
            compiler.signature(), *flags, compiler.cuh_last_update_time(), *settings, *own,
        ]  # fmt: skip

    def schemas(self, layer: Layer) -> tuple[Any, Any]:
        """Of the weight and of its input."""
        method = {"quant_method": "compressed-tensors", "format": layer.form}
        weights = self.weight_schema.from_config(method | dict(layer.weights))
        if layer.activations is None:
            return weights, self.unquantized()
        return weights, self.input_schema.from_config(method | dict(layer.activations))

    def config(self, layer: Layer) -> Any:
        """The library's LayerConfig, by which it chooses kernels, before there are tensors."""
        dtype = DTYPES[layer.dtype]
        weights, inputs = (schema.to_humming_schema(dtype) for schema in self.schemas(layer))
        return self._configured(layer, weights, inputs, None)

    def _configured(self, layer: Layer, weights: Any, inputs: Any, tensors: Any) -> Any:
        return self._layer_config(
            layer.n, layer.k, weights, inputs, layer.experts or None, PAD_N, PAD_K, layer.bias,
            DTYPES[layer.dtype], tensors=tensors,
        )  # fmt: skip

    def load(self, tensors: Mapping[str, torch.Tensor], layer: Layer) -> Matrix:
        """Raises ValueError for tensors whose names the schemas do not take, AssertionError for other shapes."""
        weights, inputs = self.schemas(layer)
        dtype, experts = DTYPES[layer.dtype], layer.experts or None
        wanted = weights.get_tensors_attrs(layer.n, layer.k, dtype, experts, layer.bias)
        wanted |= inputs.get_tensors_attrs(layer.k, dtype, experts)
        check_names(tensors, set(wanted), stacked=experts is not None)
        # As the library's own layer class: symmetric weights are encoded anew for activations in floating point.
        quantized = inputs.to_humming_schema(dtype).a_dtype
        floats = quantized is None or quantized.is_floating_point_type
        sides = {"shape_n_stacks": [layer.n], "shape_k_stacks": [layer.k], "param_dtype": dtype}
        schema, own = weights.convert_humming(
            dict(tensors), **sides, num_experts=experts, convert_symmetric_integer=floats
        )
        inputs, _ = inputs.convert_humming(dict(tensors), **sides, num_experts=experts)
        config = self._configured(layer, schema, inputs, own)
        return Matrix(self, config, self.transform(config, own), layer)

    def tuning(self, config: Any, gemm: str, rows: int) -> Any:
        """The entry, for so many rows, of the list that the library makes for all."""
        if config.a_dtype not in self.tuned(config.a_dtype.num_bits):
            return self.heuristics(config, gemm_type=gemm)  # where it makes the list, it refuses
        sample = self.heuristics_class(self.device.index).get_shape_m_sample(config, rows)
        return self.heuristics(config, shape_m=sample, gemm_type=gemm)

    def tuned(self, bits: int) -> list[Any]:
        """The activation types of so many bits that the heuristics of this architecture know."""
        found: list[Any] = getattr(self.heuristics_class(self.device.index), f"b{bits}_allowed_dtypes")
        return found

    def quantizer(self, dtype: torch.dtype, columns: int, **options: Any) -> Any:
        """What `process_input` compiles its kernels for."""
        source = self.data_type.from_torch_dtype(dtype)
        return self._input_problem(input_dtype=source, hidden_size=columns, **options)

    def cover(self, problem: Any, rows: int) -> None:
        """See to it that `process_input` finds its kernel for so many rows: where it finds none at all, it compiles
        one for each of its intervals of M."""
        rows, device = max(rows, 1), self.device.index
        with self._lock:
            covered = self._covered.setdefault((device, problem), [])
            if any(low < rows <= high for low, high, _ in covered):
                return
        interval = next(found for found in self._intervals(problem) if found[0] < rows <= found[1])
        self._input_kernel.prepare_kernels(problem, [interval], device)
        with self._lock:
            if interval not in covered:
                covered.append(interval)
            key = (device, problem, False)  # the library's; the last: no programmatic dependent launch
            self._input_kernel._str2kernel_cache.pop(key, None)
            self._input_kernel.prepare_kernels(problem, covered, device, key)


def check_names(given: Mapping[str, Any], wanted: set[str], stacked: bool = False) -> None:
    """The library takes the tensors that it knows by name and leaves the others without a word."""
    if "weight_g_idx" in given:
        raise NotImplementedError("weight_g_idx: Humming has no group activation ordering")
    if stacked:
        wanted = wanted - {"weight_shape"}
    unknown, missing = sorted(given.keys() - wanted), sorted(wanted - given.keys())
    if unknown or missing:
        raise ValueError(f"tensors: Humming's schemas do not take {unknown} and miss {missing}")


class Matrix:
    """One weight or a stack of them. tensors: by the names of humming_forward. locks are the layer's own, for layers
    may run at the same time."""

    def __init__(self, humming: Library, config: Any, tensors: dict[str, torch.Tensor], layer: Layer) -> None:
        self.humming, self.config, self.tensors, self.layer = humming, config, tensors, layer
        self._locks = torch.zeros(LOCKS, dtype=torch.int32, device=tensors["weight"].device)
        compute = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": layer.gemm}
        self._compute = json.dumps(compute)
        self._tunings: dict[int, Any] = {}
        self._quantizer = None
        if layer.activations is not None:
            self._quantizer = humming.quantizer(
                DTYPES[layer.dtype],
                layer.k,
                quant_mode=config.input_quant_mode.value,
                quant_dtype=config.a_dtype.dtype_str,
                quant_group_size=config.input_scale_group_size or None,
                group_scale_dtype=config.as_dtype.dtype_str,
            )

    def tuning(self, rows: int) -> Any:
        """Chosen once for so many rows: servers choose when they load."""
        if rows not in self._tunings:
            self._tunings[rows] = self.humming.tuning(self.config, self.layer.gemm, rows)
        return self._tunings[rows]

    def __call__(self, x: torch.Tensor, rows: int | None = None, **routing: Any) -> torch.Tensor:
        """(M, N) of x (M, K), both in 16 bits; indexed (M * top_k, N). rows: how many the heuristics reckon with,
        M where it is not given. routing: the arguments of humming_forward that say whose rows are whose."""
        if self._quantizer is not None:
            self.humming.cover(self._quantizer, len(x))
        outputs: torch.Tensor = self.humming.forward(
            self.config,
            inputs=x,
            locks=self._locks,
            compute_config=self._compute,
            tuning_config=self.tuning(len(x) if rows is None else rows),
            valid_shape_m=rows or 0,
            **self.tensors,
            **routing,
        )
        return outputs

    def compile(self, m: int, rows: int) -> str:
        """The kernel of a call; what it is. The library compiles none twice."""
        if self._quantizer is not None:
            self.humming.cover(self._quantizer, m)
        tuning, device = self.tuning(rows), self.humming.device.index
        self.humming.gemm.prepare_kernels(self.config.to_str(), self._compute, json.dumps(tuning), device)
        layer, tile = self.layer, "x".join(map(str, tuning["block_shape"]))
        types = f"{self.config.b_dtype} by {self.config.a_dtype}"
        return f"{types}, {layer.gemm} {layer.n}x{layer.k}, {tuning['mma_type']} {tile}"


def slices(config: Any, tuning: Mapping[str, Any], tiles: int, processors: int) -> int:
    """How many partial sums one output is made of at most, of so many tiles along M on so many multiprocessors.

    Stream-K lays the K steps of all tiles end to end and cuts them into equal parts, one a thread block; whole waves of
    tiles are left undivided (include/humming/scheduler.cuh of the library).
    """
    if not tuning.get("use_stream_k", True):
        return 1
    _, block_n, block_k = tuning["block_shape"]
    shared = tuning.get("multi_cast_size_a", 1)
    blocks = tuning.get("num_ctas_per_sm", 1) * (tuning.get("num_sms") or processors) // shared
    group = max(1, max(config.input_scale_group_size, config.weight_scale_group_size) // block_k)
    steps = math.ceil(config.shape_k // block_k / group) * group
    tiles *= config.shape_n // (block_n * shared)
    if tiles > blocks:
        left = tiles % blocks
        tiles = left + blocks if 0 < 10 * left <= blocks else left
    unit = math.lcm(group, tuning.get("num_stages", 2))
    part = math.ceil(max(math.ceil(tiles * steps / blocks), math.ceil((steps - 1) / 9), 1) / unit) * unit
    ends = ((tile * steps, (tile + 1) * steps - 1) for tile in range(tiles))
    return max((last // part - first // part + 1 for first, last in ends), default=1)
