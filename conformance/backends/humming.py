"""Humming (humming-kernels): GEMM kernels compiled for the format, shape and M of each call, dense and for experts.

What a weight goes through is in `humming_layers`, what experts add in `humming_experts`. The activation between two
projections, the weighted sum and the shared expert's addition are torch's, as with serving libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.backends import humming_experts
from conformance.backends.cuda import require
from conformance.backends.grouped_experts import GroupedExperts
from conformance.backends.humming_layers import (
    DENSE,
    DTYPES,
    Layer,
    Library,
    Matrix,
    arguments,
    check_names,
    slices,
)
from conformance.backends.noted import Noted, refuses
from conformance.backends.torch_weights import packed
from conformance.cases import Case
from conformance.cases.conduct import called
from reference.bounds import Contract
from reference.packing import packed_size
from reference.swiglu import GatedActivation

# Defects that the library's check of shapes meets; it looks at no numbers.
_VALIDATES = ("word-count", "zero-words", "scale-shape", "group-remainder")


class HummingExperts:
    """Layers of experts alone. gemm: how they are called."""

    libraries = ("humming-kernels",)
    kernels: Mapping[str, str] = {"moe": "humming", "moe_parallel": "humming"}
    nondeterministic = "stream-K adds more than two partial sums in the order in which thread blocks finish"

    def __init__(self, name: str, gemm: str) -> None:
        self.name, self.device, self.gemm = name, "cuda", gemm
        self.humming = Library()
        self.contract = contract_on(self.humming.device.sm_version)

    # ---- what it claims and promises

    def supports(self, case: Case) -> Support:
        reason = self._not_supported(case)
        return Support.no(reason) if reason else Support.yes()

    def _not_supported(self, case: Case) -> str:
        """Why not; empty where it does."""
        if case.act_order:
            return "Humming has no group activation ordering: it reads no weight_g_idx"
        layers = [layer_of(case, shape) for shape in _shapes(case)]
        reasons = (_unaligned(layer, case.activation.kind) for layer in layers)
        return self._not_in_its_tables(case, layers[0]) or next(filter(None, reasons), "")

    def _not_in_its_tables(self, case: Case, layer: Layer) -> str:
        """By the support matrix and the heuristics of the library, for the architecture found."""
        fmt, kind, dtype = case.weight, case.activation.kind, DTYPES[case.dtype]
        codes = f"{fmt.bits}-bit weights {'without' if fmt.symmetric else 'with'} zero points"
        by = f"{case.dtype if kind == 'a16' else kind} activations on sm_{self.humming.device.sm_version}"
        weights, inputs = (schema.to_humming_schema(dtype) for schema in self.humming.schemas(layer))
        if not self.humming.compatible(inputs, weights, dtype):
            channel = replace(weights, weight_scale_group_size=0, weight_scale_type="channel")
            if fmt.strategy == "group" and self.humming.compatible(inputs, channel, dtype):
                return f"Humming's groups are larger than {fmt.group_size} for {by}"
            return f"Humming's support matrix has no {codes} for {by}"
        a_dtype = inputs.a_dtype or self.humming.data_type.from_torch_dtype(dtype)
        if a_dtype not in self.humming.tuned(a_dtype.num_bits):
            return f"Humming's support matrix has {by}, its heuristics have not"
        return ""

    def contract_for(self, case: Case) -> Contract:
        """Of one case: how its weights meet the activations, and how many parts its sums are divided into."""
        calls = [(layer, call, plain) for plain in called(case) for layer, _, call in self._calls(plain)]
        if not calls or self._not_supported(case.plain):
            return self.contract
        rounded = case.activation.kind == "a16" and case.weight.strategy == "group"
        sums = max(self._slices(*one) for one in calls)
        return replace(self.contract, weights="rounded" if rounded else "exact", partial_sums=sums)

    def _slices(self, layer: Layer, call: tuple[int, int], case: Case) -> int:
        """Of the most unlucky distribution of tokens over experts."""
        config = self.humming.config(layer)
        tuning = self.humming.tuning(config, layer.gemm, call[1])
        block, slots = tuning["block_shape"][0], case.m * case.top_k
        tiles = range(slots // block + min(layer.experts, slots) + 1)
        if not layer.experts:
            tiles = range(-(-call[0] // block), -(-call[0] // block) + 1)
        return max(slices(config, tuning, count, self.humming.device.sm_count) for count in tiles)

    # ---- what it does

    def load_moe(self, checkpoint: MoeCheckpoint) -> GroupedExperts:
        project, known = humming_experts.PROJECTIONS[self.gemm], humming_experts.Sorted()
        w13, w2 = (
            project(self._stack(checkpoint, which, self.gemm), checkpoint.experts, known)
            for which in ("w13", "w2")
        )
        shared = None
        if "shared_w13_weight_packed" in checkpoint.tensors:
            matrices = (self._stack(checkpoint, which, DENSE) for which in ("shared_w13", "shared_w2"))
            first, second = (humming_experts.everyone(matrix) for matrix in matrices)
            shared = first, second
        return GroupedExperts(checkpoint, w13, w2, shared)

    def _stack(self, checkpoint: MoeCheckpoint, which: str, gemm: str) -> Matrix:
        """One projection of all experts, or the only one of a stack as a dense layer."""
        start = f"{which}_"
        own = {n.removeprefix(start): t for n, t in checkpoint.tensors.items() if n.startswith(start)}
        h, i = checkpoint.hidden, checkpoint.intermediate
        n, k = (2 * i, h) if which.endswith("w13") else (h, i)
        experts = len(own["weight_packed"])
        if gemm == DENSE:
            experts, own = 0, {name: tensor[0] for name, tensor in own.items()}
            own["weight_shape"] = torch.tensor((n, k))
        activations = arguments(checkpoint.input_activations)
        layer = Layer(
            arguments(checkpoint.weights) or (), activations, checkpoint.dtype,
            n, k, "bias" in own, experts, gemm, checkpoint.format,
        )  # fmt: skip
        return self.humming.load(own, layer)

    # ---- compiled beforehand

    def prepare(self, cases: list[Case], workers: int) -> Iterator[str]:
        """Compile the kernels that the calls of these cases launch, and no others. What the library refuses to load is
        left to the case, and so is what was compiled before: the library's cache has it."""
        noted = Noted(self.humming.cache, *self.humming.identity())
        layers: dict[tuple[Layer, bool], dict[tuple[int, int], str]] = {}
        inputs: dict[str, tuple[Any, int, str]] = {}
        for case in cases:
            for layer, low, call in self._calls(case):
                if (line := repr((layer, low, call))) not in noted:
                    layers.setdefault((layer, low), {})[call] = line
            with suppress(Exception):  # what no quantizer is made for
                for problem in self._quantizers(case):
                    if (line := repr((problem, case.m))) not in noted:
                        inputs[line] = problem, case.m, case.cell
        with ThreadPoolExecutor(workers) as pool:
            started = [pool.submit(self._compile, *key, own) for key, own in layers.items()]
            started += [pool.submit(self._cover, *own, line) for line, own in inputs.items()]
            for done in as_completed(started):
                said, settled = done.result()
                noted.add(*settled)
                yield from said

    def _calls(self, case: Case) -> Iterator[tuple[Layer, bool, tuple[int, int]]]:
        """A case's layers, whether the lowest code occurs in their weights, and M and rows of its calls."""
        if case.operation == "linear":
            yield layer_of(case, (case.n, case.k)), True, (case.m, case.m)
        elif case.operation == "moe":
            for which, shape, experts, gemm, call in humming_experts.calls_of(case, self.gemm):
                low = (case.recipe, which) != ("integers", "w13")  # whose codes are -1, 0 and 1
                yield layer_of(case, shape, experts, gemm), low, call

    def _quantizers(self, case: Case) -> Iterator[Any]:
        """What the input kernel alone is asked for."""
        return iter(())

    def _compile(self, layer: Layer, low: bool, calls: Mapping[tuple[int, int], str]) -> _Compiled:
        what = f"{layer.gemm} {layer.n}x{layer.k}"
        try:
            matrix = self.humming.load(blank(layer, low, self.device), layer)
        except Exception as error:
            return _left(what, error, *calls.values())
        said: dict[str, None] = {}  # in order; calls may share a kernel
        settled: list[str] = []
        for call, line in sorted(calls.items()):
            try:
                lines, own = [matrix.compile(*call)], [line]
            except Exception as error:
                lines, own = _left(what, error, line)
            said |= dict.fromkeys(lines)
            settled += own
        return list(said), settled

    def _cover(self, problem: Any, rows: int, what: str, line: str) -> _Compiled:
        try:
            self.humming.cover(problem, rows)
        except Exception as error:
            return _left(what, error, line)
        return [what], [line]


# Lines of progress, and what need not be asked again
_Compiled = tuple[list[str], list[str]]


def _left(what: str, error: Exception, *lines: str) -> _Compiled:
    kind = type(error).__name__
    return [f"{what}: left to the case: {kind}: {error}"], list(lines) if refuses(kind) else []


class HummingBackend(HummingExperts):
    """All that the library does; experts by the indexed GEMM."""

    kernels: Mapping[str, str] = {
        **HummingExperts.kernels,
        "linear": "humming",
        "activation_quantization": "process_input_kernel",
        "swiglu": "process_input_kernel",
        "packing": "pack_weight_kernel",
        "dequantize": "unpack_weight_kernel",
    }

    def __init__(self) -> None:
        super().__init__("humming", humming_experts.INDEXED)

    def _not_supported(self, case: Case) -> str:
        if case.operation == "validation":
            return "" if case.recipe in _VALIDATES else "Humming does not check this"
        if case.operation == "packing":
            size = (case.n, case.k)[case.dim]
            return f"Humming packs whole blocks of 32 codes, not {size}" if size % 32 else ""
        if case.operation == "activation_quantization":
            return self._not_quantized(case)
        if case.operation == "dequantize" and not case.act_order:
            ragged = case.k % 32 or (not case.weight.symmetric and case.n % 32)
            return f"Humming unpacks whole blocks of 32 codes, not {case.n} by {case.k}" if ragged else ""
        return "" if case.operation == "swiglu" else super()._not_supported(case)

    def _not_quantized(self, case: Case) -> str:
        fmt, sm = case.activation, self.humming.device.sm_version
        if not fmt.symmetric:
            return "Humming's input schema says: asymmetric input quantization is not supported"
        if fmt.kind == "fp8" and sm < 89:
            return f"fp8 begins with sm_89; this is sm_{sm}"
        return "Humming's quantizer takes columns in pairs" if case.k % 2 else ""

    def pack(self, codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
        unsigned = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        words: torch.Tensor = self.humming.ops.pack_weight(unsigned.movedim(axis, -1).contiguous(), bits)
        return words.movedim(-1, axis).contiguous()

    def unpack(self, words: torch.Tensor, bits: int, size: int, axis: int) -> torch.Tensor:
        if size % 32:
            raise NotImplementedError(f"{size} codes of {bits} bits: Humming unpacks whole blocks of 32")
        lines = words.movedim(axis, -1).contiguous()
        unsigned = self.humming.ops.unpack_weight(lines, bits, dtype=torch.uint8)
        codes = (unsigned.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        return codes.movedim(-1, axis).contiguous()

    def dequantize(self, checkpoint: Checkpoint) -> torch.Tensor:
        """By the library's own dequantization of a converted checkpoint, which is in float32."""
        layer, dtype = _layer_in(checkpoint), DTYPES[checkpoint.dtype]
        weights, _ = self.humming.schemas(layer)
        check_names(checkpoint.tensors, set(weights.get_tensors_attrs(layer.n, layer.k, dtype)))
        schema, own = weights.convert_humming(dict(checkpoint.tensors), [layer.n], [layer.k], dtype)
        matrix: torch.Tensor = schema.dequant_tensors(own)
        return matrix.to(dtype)

    def quantize_activation(
        self, x: torch.Tensor, args: Mapping[str, Any], input_scale: float | None
    ) -> list[torch.Tensor]:
        options = self._quantization(args, x.dtype)
        static = None if input_scale is None else torch.tensor([input_scale], device=x.device)
        self.humming.cover(self.humming.quantizer(x.dtype, x.shape[1], **options), len(x))
        codes, groups, tokens = self.humming.ops.process_input(x, token_scales=static, **options)
        if options["quant_dtype"] == "int4":
            codes = _nibbles(codes)
        scale = tokens if groups is None else groups
        return [codes, scale.contiguous() if static is None else scale.reshape(1, 1)]

    def _quantization(self, args: Mapping[str, Any] | None, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of process_input for QuantizationArgs."""
        method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        schema = self.humming.input_schema.from_config(method | dict(arguments(args) or ()))
        schema = schema.to_humming_schema(dtype)
        return {
            "quant_mode": schema.input_quant_mode.value,
            "quant_dtype": schema.a_dtype.dtype_str,
            "quant_group_size": schema.input_scale_group_size or None,
        }

    def load_linear(self, checkpoint: Checkpoint) -> Matrix:
        return self.humming.load(checkpoint.tensors, _layer_in(checkpoint))

    def swiglu(self, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
        """By the kernel that quantizes inputs, which takes an activation as an expression in C++."""
        options = gate(activation)
        self.humming.cover(self.humming.quantizer(x.dtype, x.shape[1] // 2, **options), len(x))
        h: torch.Tensor = self.humming.ops.process_input(x, **options)[0]
        return h

    def _quantizers(self, case: Case) -> Iterator[Any]:
        if case.operation == "swiglu":
            yield self.humming.quantizer(DTYPES[case.dtype], case.n, **gate(case.gated))
        elif case.operation == "activation_quantization":
            options = self._quantization(case.activation.to_quantization_args(), DTYPES[case.dtype])
            yield self.humming.quantizer(DTYPES[case.dtype], case.k, **options)


def contract_on(sm: int) -> Contract:
    """What its kernels promise, whatever the case.

    weights: in groups (q - z) * s is rounded to 16 bits before a 16-bit product (mainloop_arith.cuh); under a scale a
    channel, and by quantized activations, the codes themselves are multiplied.
    accumulator: fp8 tensor cores of sm_89 and sm_90 sum 14 significant bits; a group is promoted, a channel never.
    integers: wgmma and mma sum int32 inside a group, which is then scaled and added in float32.
    quantizer: amax / 127 in float32, floored at 1e-30, codes by the reciprocal (quantization.cuh).
    epilogue: the sum, times the activation's scale, is rounded to 16 bits, then scaled by channel and added to the bias
    in 16 bits (epilogue_arith.cuh); with quantized activations on sm_100 and sm_110 only the bias is.
    partial_sums: stream-K joins up to ten in 16 bits (gmem_writer.cuh); contract_for says how many.
    intermediates: outputs of both projections, and what lies between, are stored in 16 bits.
    """
    return Contract(
        weights="any",
        accumulator="e8m13" if sm in (89, 90) else "fp32",
        integers="int32",
        quantizer="kernel",
        epilogue="any" if sm // 10 in (10, 11) else "16-bit",
        partial_sums=1,
        intermediates="16-bit",
    )


def layer_of(case: Case, shape: tuple[int, int], experts: int = 0, gemm: str = DENSE) -> Layer:
    """A case's weight of shape (N, K)."""
    weights = arguments(case.weight.to_quantization_args()) or ()
    activations = arguments(case.activation.to_quantization_args())
    return Layer(weights, activations, case.dtype, *shape, case.bias, experts, gemm)


def _layer_in(checkpoint: Checkpoint) -> Layer:
    n, k = checkpoint.tensors["weight_shape"].tolist()
    weights, activations = arguments(checkpoint.weights) or (), arguments(checkpoint.input_activations)
    bias = "bias" in checkpoint.tensors
    return Layer(weights, activations, checkpoint.dtype, n, k, bias, form=checkpoint.format)


def _shapes(case: Case) -> list[tuple[int, int]]:
    return [(2 * case.n, case.k), (case.k, case.n)] if case.experts else [(case.n, case.k)]


def _unaligned(layer: Layer, kind: str) -> str:
    """What the library's kernels assert of the padding."""
    step = {"a16": 8, "int4": 32}.get(kind, 16)  # of K: 16 bytes of activations
    if layer.n % 8 or layer.k % step:
        return f"Humming takes N in multiples of 8 and, of {kind} activations, K in multiples of {step}"
    return ""


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int8 (M, K) of bytes (M, K / 2) that hold the even column in their low half."""
    halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return (halves.to(torch.int8) ^ 8) - 8


def gate(activation: GatedActivation) -> dict[str, str]:
    """The arguments of process_input for a gated activation: a is the first of two values, b the second (C80, C81)."""
    g, up = ("b", "a") if activation.arrangement == "up-gate" else ("a", "b")
    limit = None if activation.limit is None else f"{activation.limit!r}f"
    if limit is not None:
        up = f"fminf(fmaxf({up}, -{limit}), {limit})"
        g = f"fminf({g}, {limit})" if activation.clamp == "before" else g
    phi = {
        "silu": f"{g} / (1.f + expf(-{float(activation.alpha)!r}f * {g}))",
        "gelu": f"0.5f * {g} * (1.f + erff({g} * 0.70710678f))",
        "gelu-tanh": f"0.5f * {g} * (1.f + tanhf(0.79788456f * ({g} + 0.044715f * {g} * {g} * {g})))",
    }[activation.kind]
    if activation.clamp == "after":
        phi = f"fminf({phi}, {limit})"
    split = "binary_interleaved" if activation.arrangement == "interleaved" else "binary_split"
    return {
        "activation_type": split,
        "activation_impl": f"({phi}) * ({up} + {float(activation.beta)!r}f)",
    }


def blank(layer: Layer, low: bool, device: str) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of equal codes: the lowest one, or in its place the middle one."""
    args = dict(layer.weights)
    bits, n, k = args["num_bits"], layer.n, layer.k
    groups = k // args.get("group_size", k)
    stack = (layer.experts,) if layer.experts else ()
    code = torch.full((1, k), 0 if low else 2 ** (bits - 1), dtype=torch.uint8, device=device)
    dtype = DTYPES[layer.dtype]
    tensors = {
        "weight_packed": packed(code, bits, 1).expand(*stack, n, -1).contiguous(),
        "weight_scale": torch.ones((*stack, n, groups), dtype=dtype, device=device),
    }
    if not args["symmetric"]:
        words = (*stack, packed_size(n, bits), groups)
        tensors["weight_zero_point"] = torch.zeros(words, dtype=torch.int32, device=device)
    if layer.bias:
        tensors["bias"] = torch.zeros((*stack, n), dtype=dtype, device=device)
    if not stack:
        tensors["weight_shape"] = torch.tensor((n, k))
    return tensors


def backend() -> HummingBackend:
    """Raises EnvironmentMissing: no GPU, no humming-kernels."""
    _require()
    return HummingBackend()


def grouped() -> HummingExperts:
    """Experts by grouped GEMM, rows one expert after the other."""
    _require()
    return HummingExperts("humming_grouped", humming_experts.CONTIGUOUS)


def masked() -> HummingExperts:
    """Experts by grouped GEMM, the same number of rows for each."""
    _require()
    return HummingExperts("humming_masked", humming_experts.MASKED)


def _require() -> None:
    require("humming", "humming-kernels", (7, 5))
