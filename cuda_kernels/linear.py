"""Quantized weights and activations on tensors, and the choice of the kernel that multiplies them.

    weight = PackedWeight.load(tensors, args, n, k)         # checks the checkpoint, repacks nothing
    y = project(runtime, weight, Activations(x))            # x (M, K) in 16 bits
    y = project(runtime, weight, quantize(runtime, x, "int8"))

The same functions serve experts: a weight is a stack of matrices, and `Slots` says which row of x meets which of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cuda_kernels.runtime import THREADS, Runtime, blocks_for

DTYPES = {torch.bfloat16: 0, torch.float16: 1}  # BF16 and FP16 of numbers.cuh
_A16, _INTEGER, _FP8 = 0, 1, 2  # of weights.cuh
_TARGETS = {"int8": 0, "int4": 1, "fp8": 2}  # of quantizer.cuh

# So few rows of outputs of so few weights: a thread an output is enough.
TILED_ROWS, TILED_WEIGHTS = 16, 1 << 20
_HEIGHT, _WIDTH = 64, 128  # of linear_tiled.cu
_TENSOR_CORE_TOKENS = 16
_GEMV_TOKENS = 4
_WAVE = 32  # what a wave of blocks costs, in blocks of 32 x 128 weights that a multiprocessor reads meanwhile


def packed_words(codes: int, bits: int) -> int:
    """32-bit words of a line of so many codes (C12)."""
    return -(-codes * bits // 32)


@dataclass(frozen=True)
class PackedWeight:
    """A stack of E matrices (N, K) as a checkpoint stores it.

    words: int32 (E, N, words of K), from a multiple of 16 bytes on. scale: (E, N, G) in 16 bits. zero_point: int32
    (E, words of N, G) or None. g_idx and order: int32 (E, K), the group of each column and the columns sorted by it, or
    None. bias: (E, N) or None.
    """

    words: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    g_idx: torch.Tensor | None
    order: torch.Tensor | None
    bias: torch.Tensor | None
    n: int
    k: int
    bits: int
    group_size: int

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return int(self.scale.shape[-1])

    @classmethod
    def load(
        cls, tensors: Mapping[str, Any], args: Mapping[str, Any], n: int, k: int, prefix: str = ""
    ) -> PackedWeight:
        """From checkpoint tensors `{prefix}weight_packed`, ... and `{prefix}bias`, of one matrix or of a stack.

        args: QuantizationArgs. Raises NotImplementedError for what the kernels do not have, ValueError for tensors that
        contradict each other or the format (C12, C13, C17, C21, C25).
        """
        bits = int(args["num_bits"])
        strategy = args.get("strategy") or ("group" if (args.get("group_size") or -1) > 0 else "channel")
        if args.get("type", "int") != "int" or not 2 <= bits <= 8:
            raise NotImplementedError(
                f"weights of {bits} bits, type {args.get('type')}: only integers of 2 to 8 bits"
            )
        if strategy not in ("channel", "group"):
            raise NotImplementedError(f"weight scales by {strategy}: only by channel and by group")
        group_size = int(args["group_size"]) if strategy == "group" else k
        if n < 1 or k < 1:
            raise ValueError(f"weight_shape: [{n}, {k}] has no weights")

        def stacked(name: str, dims: int) -> torch.Tensor | None:
            tensor = tensors.get(prefix + name)
            if tensor is None:
                return None
            return (tensor if tensor.ndim == dims + 1 else tensor[None]).contiguous()

        words, scale = stacked("weight_packed", 2), stacked("weight_scale", 2)
        if words is None or scale is None:
            raise ValueError(f"{prefix}weight_packed and {prefix}weight_scale are needed")
        words, matrices = _aligned(words), len(words)

        def shaped(name: str, tensor: torch.Tensor, *shape: int) -> None:
            if tuple(tensor.shape[1:]) != shape:
                raise ValueError(f"{prefix}{name}: shape {list(tensor.shape[1:])}, expected {list(shape)}")
            if len(tensor) != matrices:
                raise ValueError(f"{prefix}{name}: of {len(tensor)} matrices, weight_packed has {matrices}")

        g_idx, order = stacked("weight_g_idx", 1), None
        if g_idx is None and k % group_size:
            raise ValueError(f"weight_shape: groups of {group_size} do not divide K={k}")
        # A rank may hold the scales of all groups and the columns of some (C102).
        groups = k // group_size if g_idx is None else scale.shape[-1]
        shaped("weight_packed", words, n, packed_words(k, bits))
        shaped("weight_scale", scale, n, groups)
        if scale.dtype not in DTYPES:
            raise NotImplementedError(f"{prefix}weight_scale: {scale.dtype}; only bfloat16 and float16")
        zero_point = None if args.get("symmetric", True) else stacked("weight_zero_point", 2)
        if zero_point is not None:
            shaped("weight_zero_point", zero_point, packed_words(n, bits), groups)
        elif not args.get("symmetric", True):
            raise ValueError(f"{prefix}weight_zero_point: an asymmetric format needs it")
        if g_idx is not None:
            shaped("weight_g_idx", g_idx, k)
            if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
                raise ValueError(f"{prefix}weight_g_idx: a group outside 0..{groups - 1}")
            order = torch.sort(g_idx, dim=-1, stable=True).indices.to(torch.int32)
        bias = stacked("bias", 1)
        if bias is not None:
            shaped("bias", bias, n)
            bias = bias.to(scale.dtype)
        # Last, as it waits for the device: a kernel that begins early reads all of this before what was launched ends.
        if not torch.isfinite(scale).all():
            raise ValueError(f"{prefix}weight_scale: a scale is not finite")
        return cls(words, scale, zero_point, g_idx, order, bias, n, k, bits, group_size)


@dataclass(frozen=True)
class Activations:
    """Rows that meet weights. values: (T, K) in 16 bits, int8 codes or e4m3 codes. scales: float32 (T) of codes."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def kind(self) -> int:
        return {torch.int8: _INTEGER, torch.float8_e4m3fn: _FP8}.get(self.values.dtype, _A16)


@dataclass(frozen=True)
class Slots:
    """Which rows meet which matrices. sorted_ids, expert_ids: int32, aligned in blocks of `block`, as
    `moe_align_block_size` gives them. count: the slots there are, rows of the output; an id from count on is no slot.
    top_k: slots of a row of x; 1 where x has a row for each slot."""

    sorted_ids: torch.Tensor
    expert_ids: torch.Tensor
    block: int
    count: int
    top_k: int


def project(
    runtime: Runtime,
    weight: PackedWeight,
    x: Activations,
    slots: Slots | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """y = x W^T + bias in the weight's dtype: (M, N), or (count, N) of slots, where rows that no slot names stay as
    they were allocated.

    kernel: `plain`, `tiled`, `gemv` or `mma4`, by its conditions otherwise. Raises ValueError where x does not fit.
    """
    values = x.values.contiguous()
    if values.ndim != 2 or values.shape[1] != weight.k:
        raise ValueError(f"x: shape {list(values.shape)}, expected [M, {weight.k}]")
    if x.kind == _A16 and values.dtype != weight.dtype:
        raise ValueError(f"x: {values.dtype}, the layer computes in {weight.dtype}")
    rows = len(values) if slots is None else slots.count
    y = torch.empty((rows, weight.n), dtype=weight.dtype, device=values.device)
    if kernel is None:
        kernel = _choice(runtime, weight, x.kind, values, rows, slots)
    if kernel in ("gemv", "mma4"):
        _few_tokens(runtime, kernel, weight, values, y)
    else:
        _any_rows(runtime, kernel, weight, x, values, slots, y)
    return y


def _choice(
    runtime: Runtime, weight: PackedWeight, kind: int, values: torch.Tensor, rows: int, slots: Slots | None
) -> str:
    if not runtime.cooperative:
        return "plain"
    if slots is None and kind == _A16 and weight.g_idx is None and weight.k % 128 == 0:
        tokens, whole = len(values), weight.group_size % 128 == 0
        if weight.bits == 4 and whole and weight.n % 32 == 0 and tokens <= _TENSOR_CORE_TOKENS:
            return "mma4"
        if weight.group_size % 32 == 0 and tokens <= _GEMV_TOKENS:
            return "gemv"
    small = rows <= TILED_ROWS and weight.n * weight.k < TILED_WEIGHTS
    whole = slots is None or slots.block <= _HEIGHT or slots.block % _HEIGHT == 0
    return "plain" if small or not whole else "tiled"


def _few_tokens(
    runtime: Runtime, kernel: str, weight: PackedWeight, x: torch.Tensor, y: torch.Tensor
) -> None:
    if len(x) == 0:
        return
    x = _aligned(x)
    common = x, weight.words, weight.scale, weight.zero_point, weight.bias, y, DTYPES[weight.dtype]
    if kernel == "mma4":
        cut = _mma4_on(x.device, weight.n, weight.k, blocks_for(len(x), 8))
        runtime.launch(
            "project_mma4", cut.blocks, 512, *common, len(x), weight.n, weight.k, weight.group_size, cut.side_log,
            cut.range, cut.packed_blocks, cluster=cut.cluster, shared=cut.shared, early=True,
        )  # fmt: skip
    else:
        blocks = blocks_for(weight.n, 16)
        runtime.launch(
            "project_gemv", blocks, 256, *common, weight.bits, len(x), weight.n, weight.k, weight.group_size
        )


@dataclass(frozen=True)
class Mma4Cut:
    """How a product is spread over blocks of project_mma4 (linear_mma.cu). blocks: of the grid. cluster: blocks that
    share K. shared: bytes."""

    blocks: int
    cluster: int
    side_log: int
    range: int
    packed_blocks: int
    shared: int


def mma4_cut(n: int, k: int, token_tiles: int, sms: int, clusters: bool, memory: int) -> Mma4Cut:
    """clusters: whether the device has them. memory: bytes of shared memory that a block may have there."""
    column_blocks, row_tiles = k // 128, n // 32

    def cost(side_log: int, cluster: int) -> tuple[int, int, int]:
        """What a multiprocessor has to read, in times of the grid; of equals the one that reads x least often."""
        waves = blocks_for(blocks_for(row_tiles, 1 << side_log), sms // cluster or 1)
        return waves * ((blocks_for(column_blocks, cluster) << side_log) + _WAVE), -side_log, cluster

    def memory_of(side_log: int, cluster: int) -> tuple[int, int]:
        """Bytes, as linear_mma.cu says: of words and of what a cluster's blocks send each other; of what all groups of
        warps need for a block of columns each."""
        exchanged = token_tiles * (8 << 10) + 128 if cluster > 1 else 0
        return (64 << 10) + exchanged, (token_tiles * (2 << 10) + (128 << side_log) + 16) * (16 >> side_log)

    # Larger clusters do not all fit on a device at once.
    sizes = (1, 2) if clusters and column_blocks > 1 else (1,)
    cuts = [(s, c) for s in (1, 2, 3, 4) for c in sizes if sum(memory_of(s, c)) <= memory]
    side_log, cluster = min(cuts, key=lambda cut: cost(*cut))
    fixed, each = memory_of(side_log, cluster)
    range_, splits = blocks_for(column_blocks, cluster), 16 >> side_log
    rounds = min((memory - fixed) // each, blocks_for(range_, splits))
    blocks = blocks_for(row_tiles, 1 << side_log) * cluster
    return Mma4Cut(blocks, cluster, side_log, range_, rounds * splits, fixed + rounds * each)


@cache
def _mma4_on(device: torch.device, n: int, k: int, token_tiles: int) -> Mma4Cut:
    has = torch.cuda.get_device_properties(device)
    return mma4_cut(
        n, k, token_tiles, has.multi_processor_count, has.major >= 9, has.shared_memory_per_block_optin
    )


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it does not begin at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _any_rows(
    runtime: Runtime,
    kernel: str,
    weight: PackedWeight,
    x: Activations,
    values: torch.Tensor,
    slots: Slots | None,
    y: torch.Tensor,
) -> None:
    rows = len(y)
    sorted_ids = expert_ids = None
    positions, top_k, block = rows, 1, 1
    if slots is not None:
        sorted_ids, expert_ids = slots.sorted_ids, slots.expert_ids
        positions, top_k, block = sorted_ids.numel(), slots.top_k, slots.block
    arguments = (
        values, x.scales, weight.words, weight.scale, weight.zero_point, weight.g_idx, weight.order, weight.bias,
        sorted_ids, expert_ids, y, x.kind, DTYPES[weight.dtype], weight.bits, weight.n, weight.k, weight.group_size,
        weight.groups, rows, positions, top_k, block,
    )  # fmt: skip
    if kernel == "tiled":
        height = min(_HEIGHT, block if slots is not None else 8 * max(1, blocks_for(rows, 8)))
        grid = blocks_for(positions, height), blocks_for(weight.n, _WIDTH)
        runtime.launch("project_tiled", grid, 256, *arguments, height)
    else:
        runtime.launch("project_plain", blocks_for(positions * weight.n), THREADS, *arguments)


def quantize(
    runtime: Runtime, x: torch.Tensor, target: str, group_size: int = 0, kernel: str | None = None
) -> Activations:
    """Codes of x (M, K) with a scale a token, or a group of columns. target: `int8`, `int4` or `fp8`."""
    codes, scales, _ = quantized(runtime, x, target, group_size or x.shape[1], kernel=kernel)
    return Activations(codes, scales)


def quantized(
    runtime: Runtime,
    x: torch.Tensor,
    target: str,
    length: int,
    asymmetric: bool = False,
    given: float = 0.0,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes of x (M, K), int8 or float8_e4m3fn, with a scale for every `length` numbers in a row of memory.

    given: the scale of a static format; scales is then that one number, otherwise float32 (numbers / length).
    asymmetric: with int32 zero points, shaped like scales. kernel: `plain` or `block`.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"x: {x.dtype}; only bfloat16 and float16 are quantized")
    x = x.contiguous()
    count = x.numel() // length if length else 0
    codes = torch.empty(
        x.shape, dtype=torch.float8_e4m3fn if target == "fp8" else torch.int8, device=x.device
    )
    scales = torch.empty(1 if given else count, dtype=torch.float32, device=x.device)
    if given:
        scales.fill_(given)
    zero_points = torch.empty(count, dtype=torch.int32, device=x.device) if asymmetric else None
    kernel = kernel or ("block" if runtime.cooperative else "plain")
    where = (count, 128 if length <= 1024 else 256) if kernel == "block" else (blocks_for(count), THREADS)
    runtime.launch(
        f"quantize_{kernel}", *where, x, codes.view(torch.uint8), scales, zero_points, DTYPES[x.dtype],
        _TARGETS[target], count, length, given,
    )  # fmt: skip
    return codes, scales, zero_points
