"""Our own kernels on the host: they conform, with a fault compiled in they do not; what their runtime refuses."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import ROOT

from conformance.backends import cuda_mutants
from conformance.backends.cuda_kernels import CudaKernelsBackend, host_backend
from conformance.cases import all_cases
from conformance.data import linear_problem
from conformance.diagnosis import Diagnosis
from conformance.direct import judged
from conformance.goals import LinearGoal, MoeGoal, QuantizationGoal
from conformance.goals.dense import ArrayGoal
from conformance.verdict import Outcome
from cuda_kernels import build
from cuda_kernels.build import CompileError, ToolMissing, host_object
from cuda_kernels.cache import cached
from cuda_kernels.linear import PackedWeight, mma4_cut
from cuda_kernels.mutants import MUTANTS
from cuda_kernels.mutants.dense import DENSE
from cuda_kernels.runtime import HostRuntime, LaunchError
from cuda_kernels.sources import Library, SourceError, library, parse
from reference import mutants as oracle
from reference.formats import ActivationFormat, WeightFormat

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

INTEGERS = "linear/w2-g32-sym/a16/bf16/m7-n33-k32-bias/integers-0"
QUANTIZED_INTEGERS = "linear/w2-g32-sym/a-int8/bf16/m7-n33-k32-bias/integers-0"
ASYMMETRIC = "linear/w5-g32-asym/a16/bf16/m7-n33-k32/random-0"
GROUPS = "linear/w2-g32-sym/a16/bf16/m1-n64-k128-bias/random-0"
ZERO_TOKENS = "activation_quantization/a-int8/bf16/m3-k1/zero-tokens-0"
INT4_TIES = "activation_quantization/a-int4/bf16/m3-k1/ties-0"

# macro -> the case that must refuse it
SEEN_BY = {
    "QCTS_PACKED_WIDTH_FLOORED": "packing/w1/dim1/n10-k33/ramp-0",
    "QCTS_PACKED_WITHOUT_OFFSET": "packing/w1/dim0/n10-k33/ramp-0",
    "QCTS_STRADDLING_HALF_DROPPED": ASYMMETRIC,
    "QCTS_NEIGHBOURS_SWAPPED": INTEGERS,
    "QCTS_TWOS_COMPLEMENT": INTEGERS,
    "QCTS_ZERO_POINT_PLUS_ONE": ASYMMETRIC,
    "QCTS_ZERO_POINT_OF_GROUP_0": "linear/w5-g32-asym/a16/bf16/m1-n64-k128/trained-0",
    "QCTS_ZERO_POINT_OF_NEXT_ROW": ASYMMETRIC,
    "QCTS_ZERO_POINT_NOT_SCALED": "dequantize/w2-channel-asym/bf16/n130-k272/uniform-0",
    "QCTS_SCALE_OF_NEXT_GROUP": GROUPS,
    "QCTS_G_IDX_IGNORED": "linear/w2-g128-sym-gidx/a16/bf16/m17-n64-k384/identity-0",
    "QCTS_GROUPS_ONE_COLUMN_EARLY": GROUPS,
    "QCTS_SCALE_OF_EXPERT_BEFORE": "moe/w3-channel-sym/a-fp8/bf16/swigluoai-halves/t1-e4-k1-h33-i17/readout-0",
    "QCTS_BIAS_OF_EXPERT_BEFORE": "moe/w5-channel-asym/a16/fp16/gelu-tanh/t1-e4-k1-h33-i17-bias/integers-0",
    "QCTS_LAST_COLUMN_DROPPED": INTEGERS,
    "QCTS_INTEGER_SUM_OF_16_BITS": "linear/w7-g32-sym/a-int8/bf16/m7-n33-k32-bias/random-0",
    "QCTS_SUM_OF_16_BITS": INTEGERS,
    "QCTS_SUM_ROUNDED_BEFORE_SCALE": INTEGERS,
    "QCTS_OUTPUT_TRUNCATED": INTEGERS,
    "QCTS_BIAS_AFTER_ROUNDING": INTEGERS,
    "QCTS_BIAS_DROPPED_IN_LAST_TILE": INTEGERS,
    "QCTS_ACTIVATION_SCALE_DROPPED": QUANTIZED_INTEGERS,
    "QCTS_ACTIVATION_SCALE_OF_TOKEN_BEFORE": QUANTIZED_INTEGERS,
    "QCTS_OTHER_CONVENTION": ZERO_TOKENS,
    "QCTS_ROUNDED_HALF_AWAY": "activation_quantization/a-int8/bf16/m5-k33/ties-0",
    "QCTS_CLAMP_ONE_SHORT": INT4_TIES,
    "QCTS_INT8_INSTEAD_OF_INT4": INT4_TIES,
    "QCTS_E4M3_TRUNCATED": "activation_quantization/a-fp8-static/bf16/m3-k1/outliers-0",
    "QCTS_AMAX_OF_NEXT_TOKEN": ZERO_TOKENS,
    "QCTS_AMAX_WITHOUT_TAIL": "activation_quantization/a-int8/fp16/m5-k33/one-sided-0",
    "QCTS_AMAX_WITHOUT_ABS": ZERO_TOKENS,
    "QCTS_ACTIVATION_SCALE_IN_BF16": ZERO_TOKENS,
    "QCTS_ZERO_DIVIDED_BY_ZERO": "activation_quantization/a-fp8/bf16/m1-k128/zero-tokens-0",
}


def small(operation, count, **wanted):
    """The smallest quick cases of an operation that are like this, no two of one weight and activation format."""
    found = {}
    for case in sorted(all_cases().values(), key=lambda c: (c.m * c.n * c.k, c.id)):
        like = case.operation == operation and all(getattr(case, name) == v for name, v in wanted.items())
        if like and case.quick and (case.m or case.n):
            found.setdefault((case.weight.name, case.activation.name), case)
    return list(found.values())[:count]


CASES = {
    case.id: case
    for case in (
        *(all_cases()[name] for name in sorted(set(SEEN_BY.values()))),
        *small("packing", 8),
        *small("packing", 3, experts=3, dim=0),
        *small("dequantize", 8),
        *small("dequantize", 2, act_order=True),
        *small("activation_quantization", 9, recipe="magnitudes"),
        *small("activation_quantization", 9, recipe="saturation"),
        *small("activation_quantization", 9, dtype="fp16"),
        *(
            c
            for kind in ("random", "integers", "scales", "magnitudes")
            for c in small("linear", 5, recipe=kind)
        ),
        *small("linear", 60, dtype="fp16")[::6],
        *small("linear", 80, act_order=True, recipe="integers")[::14],
        *small("linear", 1, recipe="empty"),
        *(c for c in all_cases().values() if c.operation == "validation" and c.weight.bits in (3, 4)),
    )
}


@pytest.fixture(autouse=True)
def nothing_is_diagnosed(monkeypatch):
    """Whether a kernel is refused is asked here, not why."""
    for goal in (ArrayGoal, LinearGoal, QuantizationGoal, MoeGoal):
        monkeypatch.setattr(goal, "diagnose", lambda *_: Diagnosis("refused"))


@pytest.fixture(scope="module")
def right():
    return host_backend()


@pytest.fixture(scope="module")
def compiled():
    """The objects of all mutants, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda m: host_object(m.source, (m.macro,)), [m for m in DENSE if m.host]))


class Refused(Exception):
    pass


# ---- the kernels


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_conform(right, case):
    verdict = judged(right, CASES[case])
    assert verdict.outcome is Outcome.CONFORMS, verdict.detail


def test_every_mutant_of_the_host_has_a_case():
    assert set(SEEN_BY) == {m.macro for m in DENSE if m.host}


@pytest.mark.parametrize("macro", SEEN_BY)
def test_a_mutant_is_refused(compiled, macro):
    verdict = judged(CudaKernelsBackend(HostRuntime([macro]), "mutant"), all_cases()[SEEN_BY[macro]])
    assert verdict.outcome is Outcome.DIVERGES, verdict.detail


def test_the_table_of_mutants_is_that_of_the_sources():
    asked = {
        macro
        for path in [*library().root.glob("*.cu"), *library().root.glob("*.cuh")]
        for macro in re.findall(r"#if.*\bQCTS_\w+|#elif.*\bQCTS_\w+", path.read_text())
        for macro in re.findall(r"QCTS_\w+", macro)
    }
    assert asked == {m.macro for m in MUTANTS.values()}
    for mutant in MUTANTS.values():
        assert library().macros(mutant.source, [mutant.macro]), (
            f"{mutant.source} does not ask for {mutant.macro}"
        )
        assert mutant.host != library().cooperative(mutant.source, [mutant.macro]) or mutant.kind == "memory"
    assert {m.twin for m in MUTANTS.values() if m.twin} <= set(oracle.MUTANTS)
    assert sum(not m.host for m in MUTANTS.values()) >= 10


def test_mutants_are_backends_by_name():
    assert cuda_mutants.host.zero_point_plus_one().name == "cuda_kernels_host.zero_point_plus_one"
    with pytest.raises(AttributeError, match="no mutant 'nonsense'"):
        _ = cuda_mutants.host.nonsense
    with pytest.raises(AttributeError, match="only where threads cooperate"):
        _ = cuda_mutants.host.store_out_of_bounds


def test_a_non_contiguous_x_is_right_and_another_shape_refused(right):
    problem = linear_problem(all_cases()[INTEGERS])
    tensors = {n: torch.from_numpy(t.view(np.int16) if t.dtype == ml_dtypes.bfloat16 else t) for n, t in
               problem.checkpoint.tensors.items()}  # fmt: skip
    tensors = {n: t.view(torch.bfloat16) if t.dtype == torch.int16 else t for n, t in tensors.items()}
    layer = right.load_linear(replace(problem.checkpoint, tensors=tensors))
    x = torch.from_numpy(problem.batches[0].view(np.int16)).view(torch.bfloat16)
    spread = torch.zeros((len(x), 2 * x.shape[1]), dtype=x.dtype)
    spread[:, ::2] = x
    assert torch.equal(layer(spread[:, ::2]), layer(x))
    with pytest.raises(ValueError, match=r"x: shape \[7, 31\], expected \[M, 32\]"):
        layer(x[:, :31])
    with pytest.raises(ValueError, match=r"x: torch.float16, the layer computes in torch.bfloat16"):
        layer(x.half())


def test_what_a_layer_is_not_loaded_from(right):
    checkpoint = linear_problem(all_cases()[INTEGERS]).checkpoint
    tensors = {
        "weight_packed": torch.zeros((33, 2), dtype=torch.int32),
        "weight_scale": torch.ones((33, 1), dtype=torch.bfloat16),
        "weight_shape": torch.tensor([33, 32]),
    }
    good = replace(checkpoint, tensors=tensors)
    right.load_linear(good)
    args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    with pytest.raises(NotImplementedError, match="a-int8-static"):
        right.load_linear(replace(good, input_activations=args))
    for changed, message in (
        ({"num_bits": 1}, "only integers of 2 to 8 bits"),
        ({"type": "float"}, "type float"),
        ({"strategy": "tensor", "group_size": None}, "scales by tensor"),
        ({"symmetric": False}, "weight_zero_point: an asymmetric format needs it"),
    ):
        with pytest.raises((NotImplementedError, ValueError), match=message):
            right.load_linear(replace(good, weights={**good.weights, **changed}))
    outside = {**tensors, "weight_g_idx": torch.full((32,), 7, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"weight_g_idx: a group outside 0\.\.0"):
        PackedWeight.load(outside, good.weights, 33, 32)
    stack = {name: torch.stack([t] * 3) for name, t in tensors.items()}
    with pytest.raises(ValueError, match=r"weight_scale: of 2 matrices, weight_packed has 3"):
        PackedWeight.load({**stack, "weight_scale": stack["weight_scale"][:2]}, good.weights, 33, 32)


@pytest.mark.parametrize(("kilobytes", "clusters"), [(227, True), (163, False), (99, True), (99, False)])
def test_a_product_of_few_tokens_is_cut_to_fit_the_device(kilobytes, clusters):
    for n, k, token_tiles in itertools.product((32, 96, 4096, 28672), (128, 384, 8192, 28672), (1, 2)):
        cut = mma4_cut(n, k, token_tiles, 132, clusters, kilobytes << 10)
        assert 0 < cut.shared <= kilobytes << 10
        assert cut.packed_blocks > 0
        assert cut.packed_blocks % (16 >> cut.side_log) == 0
        assert cut.range * cut.cluster * 128 >= k
        assert cut.blocks // cut.cluster * (32 << cut.side_log) >= n


def test_nan_in_a_token_is_in_its_outputs_and_in_no_others(right):
    checkpoint = linear_problem(all_cases()[INTEGERS]).checkpoint
    tensors = {
        "weight_packed": torch.full((33, 4), 0x77777777, dtype=torch.int32),
        "weight_scale": torch.ones((33, 1), dtype=torch.bfloat16),
        "weight_shape": torch.tensor([33, 32]),
    }
    weights = WeightFormat.of(4, -1, True).to_quantization_args()
    x = torch.ones((4, 32), dtype=torch.bfloat16)
    x[0, 0] = x[1, 17] = x[2, 31] = float("nan")
    for kind in ("int8", "int4", "fp8"):
        args = ActivationFormat(kind).to_quantization_args()
        layer = right.load_linear(
            replace(checkpoint, tensors=tensors, weights=weights, input_activations=args)
        )
        y = layer(x)
        assert y.isnan().all(dim=1).tolist() == [True, True, True, False], kind
        assert y[3].isfinite().all(), kind


# ---- numbers

CONVERSIONS = """
#include "numbers.cuh"
extern "C" __global__ void widen(const u16* __restrict__ bits, float* __restrict__ out, int dtype, long long count) {
  if (thread_number() < count) out[thread_number()] = to_float(bits[thread_number()], dtype);
}
extern "C" __global__ void narrow(const float* __restrict__ x, u16* __restrict__ out, int dtype, long long count) {
  if (thread_number() < count) out[thread_number()] = from_float(x[thread_number()], dtype);
}
extern "C" __global__ void widen_e4m3(const u8* __restrict__ codes, float* __restrict__ out) {
  if (thread_number() < 256) out[thread_number()] = e4m3_to_float(codes[thread_number()]);
}
extern "C" __global__ void narrow_e4m3(const float* __restrict__ x, u8* __restrict__ out, long long count) {
  if (thread_number() < count) out[thread_number()] = float_to_e4m3(x[thread_number()]);
}
"""


@pytest.fixture
def own(tmp_path):
    """A library of one source of the test's own, which may include the kernels' headers."""

    def make(text, name="own.cu"):
        for header in library().root.glob("*.cuh"):
            shutil.copy(header, tmp_path)
        (tmp_path / name).write_text(text)
        return Library(tmp_path)

    return make


def test_conversions(own):
    """Every number of 16 bits, and for each a float32 next to it on either side and half way to the next."""
    runtime = HostRuntime(sources=own(CONVERSIONS))
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, number in ((torch.bfloat16, 0), (torch.float16, 1)):
        wide = torch.empty(2**16)
        runtime.launch("widen", 512, 128, bits.view(dtype), wide, number, 2**16)
        expected = bits.view(dtype).float()
        assert torch.equal(wide[~expected.isnan()], expected[~expected.isnan()])
        assert wide[expected.isnan()].isnan().all()
        for x in nearby(expected):
            narrow = torch.empty(len(x), dtype=dtype)
            runtime.launch("narrow", -(-len(x) // 128), 128, x, narrow, number, len(x))
            assert torch.equal(narrow.view(torch.int16), x.to(dtype).view(torch.int16))
    codes, wide = torch.arange(256, dtype=torch.int32).to(torch.uint8), torch.empty(256)
    runtime.launch("widen_e4m3", 2, 128, codes, wide)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(wide[~expected.isnan()], expected[~expected.isnan()])
    assert wide[expected.isnan()].isnan().all()
    for x in nearby(expected):
        narrow = torch.empty(len(x), dtype=torch.uint8)
        runtime.launch("narrow_e4m3", -(-len(x) // 128), 128, x, narrow, len(x))
        right = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(narrow.numpy(), right)


def nearby(numbers):
    """The finite ones of some float32 numbers; their neighbours; half way to the next."""
    finite = np.unique(numbers[numbers.isfinite()].numpy())
    half = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    for values in (finite, half):
        for towards in (None, -np.inf, np.inf):
            near = values if towards is None else np.nextafter(values, np.float32(towards))
            yield torch.from_numpy(near[np.isfinite(near)].copy())


# ---- sources


def test_signatures():
    (found,) = parse(
        """// __global__ in a comment
        extern "C" __global__ void __launch_bounds__(256, 2)
            f(const u16* __restrict__ x, /* rows */ float* y, int rows, long long k, float by) {}""",
        "f.cu",
    )
    assert (found.kernel, found.source) == ("f", "f.cu")
    assert [(p.name, p.kind, p.pointer) for p in found.parameters] == [
        ("x", "u16", True), ("y", "float", True), ("rows", "int", False), ("k", "long long", False),
        ("by", "float", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__global__ void f(int n) {}", 'not declared `extern "C" __global__ void name'),
        ('extern "C" __global__ void f(short n) {}', "n has the type short; known are int"),
        ('extern "C" __global__ void f(const double* x) {}', r"x has the type double\*; known are i8"),
        ('extern "C" __global__ void f(int n[4]) {}', r"cannot read the parameter `int n\[4\]`"),
        ('extern "C" __global__ void f(int block_) {}', "block_ ends in `_`"),
    ],
)
def test_what_is_no_signature(text, message):
    with pytest.raises(SourceError, match=message):
        parse(text, "f.cu")


def test_a_library_refuses(own):
    two = own('extern "C" __global__ void f(int n) {}', "a.cu")
    own('extern "C" __global__ void f(int n) {}', "b.cu")
    with pytest.raises(SourceError, match=r"b\.cu: f is defined in a\.cu too"):
        two.signatures()
    with pytest.raises(SourceError, match=r"c\.cu: there is no such kernel source"):
        two.closure("c.cu")
    with pytest.raises(SourceError, match="NONSENSE: no kernel source asks for this macro"):
        HostRuntime(["NONSENSE"])


def test_cooperation_of_a_mutant_alone(own):
    text = """
    extern "C" __global__ void f(int* x) {
    #ifdef QCTS_A
      __syncthreads();
    #elif defined(QCTS_B)
      x[0] = 1;
    #else
      x[0] = 2;  // __shared__
    #endif
    }"""
    found = own(text, "f.cu")
    assert [found.cooperative("f.cu", macros) for macros in ((), ("QCTS_A",), ("QCTS_B",))] == [
        False,
        True,
        False,
    ]


# ---- launches


@pytest.fixture(scope="module")
def runtime():
    return HostRuntime()


def test_launches_that_are_refused(runtime):
    words, codes = torch.zeros((2, 4), dtype=torch.int32), torch.zeros((2, 32), dtype=torch.int8)
    sizes = (1, 2, 32, 4, 0)
    runtime.launch("unpack_codes", 1, 128, words, codes, *sizes)
    for arguments, message in (
        ((words, codes, 1, 2), "takes 7 arguments, not 4"),
        ((words.numpy(), codes, *sizes), "words is a tensor or None, not a ndarray"),
        ((words.to("meta"), codes, *sizes), "words lies on meta, the kernels run on cpu"),
        ((words.long(), codes, *sizes), "words has torch.int64, the kernel reads u32"),
        ((words.T, codes, *sizes), "words is not contiguous"),
        ((words, codes, 1, 2, 32, 4.0, 0), "bits is an integer, not a float"),
        ((words, codes, 1, 2, 32, 2**31, 0), "bits = 2147483648 does not fit into int"),
    ):
        with pytest.raises(LaunchError, match=message):
            runtime.launch("unpack_codes", 1, 128, *arguments)
    with pytest.raises(SourceError, match="there is no kernel 'nonsense'; known: align_count"):
        runtime.launch("nonsense", 1, 1)
    with pytest.raises(LaunchError, match=r"its threads cooperate \(linear_tiled\.cu\)"):
        runtime.launch("project_tiled", 1, 1)


def test_every_thread_of_a_grid_of_three_dimensions_runs_once(own):
    text = """
    #include "numbers.cuh"
    extern "C" __global__ void count(int* seen) {
      int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      seen[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1;
    }"""
    seen = torch.zeros(2 * 3 * 4 * 5 * 6, dtype=torch.int32)
    runtime = HostRuntime(sources=own("\n".join(line.strip() for line in text.splitlines())))
    runtime.launch("count", (2, 3), (4, 5, 6), seen)
    assert (seen == 1).all()
    runtime.launch("count", (2, 0), 4, seen)
    assert (seen == 1).all()


# ---- builds


def test_the_cache(own, monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTCTS_CACHE_DIR", str(tmp_path / "cache"))
    text = (
        '#include "numbers.cuh"\nextern "C" __global__ void f(int* x) {\n#ifdef QCTS_A\nx[0] = 1;\n#endif\n}'
    )
    own(text, "g.cu")
    found = own(text.replace("void f", "void h"), "f.cu")
    first = host_object("f.cu", (), found)
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("it was compiled again"))
    assert host_object("f.cu", (), found) == first
    monkeypatch.undo()
    monkeypatch.setenv("QUANTCTS_CACHE_DIR", str(tmp_path / "cache"))
    assert host_object("f.cu", ("QCTS_A",), found) != first
    (tmp_path / "numbers.cuh").write_text((tmp_path / "numbers.cuh").read_text() + "// changed\n")
    assert host_object("f.cu", (), found) != first
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_what_was_not_finished_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTCTS_CACHE_DIR", str(tmp_path))

    def half(place):
        place.write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        cached("f", ".so", ("key",), half)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert cached("f", ".so", ("key",), lambda place: place.write_bytes(b"all")).read_bytes() == b"all"


def test_what_the_compiler_says(own, monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTCTS_CACHE_DIR", str(tmp_path / "cache"))
    found = own('#include "numbers.cuh"\nextern "C" __global__ void f(int* x) { x[0] = nonsense; }')
    with pytest.raises(CompileError, match=r"(?s)own\.cu for the host: .*nonsense"):
        host_object("own.cu", (), found)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(ToolMissing, match=r"g\+\+ is not installed"):
        host_object("own.cu", (), found)


def test_compiling_for_cuda_needs_nvcc(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "compile_cuda.py")],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (4, "nvcc is not installed: the CUDA toolkit has it\n")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_compiling_for_cuda():
    command = [sys.executable, str(ROOT / "tools" / "compile_cuda.py")]
    done = subprocess.run([*command, "packing.cu", "packed_without_offset"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "2 compiled, 0 failed" in done.stdout
    done = subprocess.run([*command, "nonsense"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "no source and no mutant: nonsense\n")
