"""What a backend is, and how one is found.

A backend is any object with a `name`, `supports(case)` and a subset of the operations; an operation that
is absent is declined. Loading is apart from running: a loader repacks once, the run is what is timed.

    name: str                    shown in every report
    device: str = "cpu"          where its arrays live
    arrays: str = "torch"        "torch" or "numpy": the arrays it takes and returns
    contract: Contract           what it promises of its arithmetic (default: Contract())
    contract_for(case)           the same, where it depends on the case

    supports(case) -> Support
    pack(codes, bits, axis) -> words                   int8 -> int32
    unpack(words, bits, size, axis) -> codes           int32 -> int8
    dequantize(checkpoint) -> weight                   (N, K) in the scale's dtype
    quantize_activation(x, args, input_scale) -> codes, scales[, zero_points]
    load_linear(checkpoint) -> linear                  linear(x (M, K)) -> y (M, N) in checkpoint.dtype
    route(logits, routing, bias) -> weights, ids       float32 and int32, (T, k) each
    align_block_size(ids, experts, block, expert_map) -> sorted_ids, expert_ids, num_tokens_post_pad
    swiglu(x, activation) -> h                         (M, 2I) -> (M, I), both in 16 bits
    load_moe(checkpoint) -> moe                        moe(x (T, H), weights (T, k), ids (T, k)) -> y (T, H)
    shard_moe(checkpoint, ranks, rank) -> checkpoint   what a rank of `tp2`, `ep4`, ... holds

quantize_activation: x (M, K) in 16 bits, args the QuantizationArgs of the activations, input_scale a float or
None. codes (M, K) are int8, for int4 as well, or float8_e4m3fn; scales float32 and zero points (of
asymmetric formats) int32, (M, 1) per token, (1, 1) per tensor, (M, K / group_size) per group.

route: logits (T, E) in bf16, fp16 or fp32, routing a Routing, bias float32 (E) or None. align_block_size: ids int32
(T, k), expert_map int32 (E) or None; sorted_ids, expert_ids int32, num_tokens_post_pad int32 (1) (C77). swiglu:
activation a GatedActivation. load_moe, shard_moe: a MoeCheckpoint; weights float32, ids int32, -1 for no expert.

What a library on a GPU says of itself:

    libraries: tuple[str, ...]   distributions whose versions the report states
    kernels: str                 regular expression of the names of its own GPU kernels, or one an operation in a
                                 mapping: where none of them is launched, something else computed the answer
    nondeterministic: str        why repeated calls may differ bit by bit; empty: they do not
    prepare(cases, workers)      compile what the cases need, on so many cores; yields a line for each kernel. They
                                 are those that will be called, also what supports() declines

Each call returns an array of its own. A backend never sees an expected value. It refuses what it does not
support by raising an exception with a message.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from conformance.cases import Case
from conformance.errors import EnvironmentMissing, RunError
from reference.bounds import Contract
from reference.swiglu import GatedActivation

ENTRY_POINT_GROUP = "quantcts.backends"
_OUR_OWN = {
    "numpy": "conformance.backends.numpy:backend",
    "compressed_tensors": "conformance.backends.compressed_tensors:backend",
    "torch_cpu": "conformance.backends.torch_baseline:cpu_backend",
    "torchao_cpu": "conformance.backends.torchao:cpu_backend",
    "cuda_kernels_host": "conformance.backends.cuda_kernels:host_backend",
}
# Those that run on a GPU, each in a process of its own. `cuda` names all of them that are present.
_ON_CUDA = {
    "cuda_kernels": "conformance.backends.cuda_kernels:backend",
    "torch": "conformance.backends.torch_baseline:backend",
    "torch_native": "conformance.backends.torch_native:backend",
    "compressed_tensors_cuda": "conformance.backends.compressed_tensors:cuda_backend",
    "humming": "conformance.backends.humming:backend",
    "humming_grouped": "conformance.backends.humming:grouped",
    "humming_masked": "conformance.backends.humming:masked",
    "vllm_marlin": "conformance.backends.vllm_marlin:backend",
    "vllm_machete": "conformance.backends.vllm_machete:backend",
    "vllm_exllama": "conformance.backends.vllm_exllama:backend",
    "vllm_awq": "conformance.backends.vllm_awq:backend",
    "vllm_cutlass": "conformance.backends.vllm_cutlass:backend",
    "vllm_moe_wna16": "conformance.backends.vllm_experts:moe_wna16_backend",
    "vllm_ops": "conformance.backends.vllm_operators:backend",
    "torchao": "conformance.backends.torchao:backend",
    "torchao_int8": "conformance.backends.torchao:int8_backend",
    "gemlite": "conformance.backends.gemlite:backend",
    "conch": "conformance.backends.conch:backend",
}
EVERY_CUDA = "cuda"


@dataclass(frozen=True)
class Support:
    """Whether a backend claims a case, and why not."""

    claimed: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.claimed, bool) or not isinstance(self.reason, str):
            raise TypeError("Support is made of a bool and a reason in words")
        if not self.claimed and not self.reason:
            raise ValueError("Support.no needs a reason")

    @classmethod
    def yes(cls) -> Support:
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Support:
        """reason: one sentence for the person who reads the report; it must not be empty."""
        return cls(False, reason)


@dataclass(frozen=True)
class Checkpoint:
    """What a model loader receives for one layer, and all that a backend is given.

    tensors: `weight_packed` int32, `weight_scale`, `weight_shape` int64, where the format has them
    `weight_zero_point`, `weight_g_idx` int32, `bias`. weights and input_activations: the
    QuantizationArgs of the layer's config group. dtype: of activations and output, bf16 or fp16.
    """

    tensors: Mapping[str, Any]
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None
    dtype: str
    format: str = "pack-quantized"


@dataclass(frozen=True)
class MoeCheckpoint:
    """What a model loader receives for the experts of one layer.

    tensors: `w13_weight_packed` int32 (E, 2I, words), `w13_weight_scale` (E, 2I, G), where the format has them
    `w13_weight_zero_point` (packed along 2I, E matrices) and `w13_weight_g_idx` int32 (E, H), where the layer has one
    `w13_bias` (E, 2I); the same with `w2_` of (E, H, I); a shared expert's with `shared_w13_`, `shared_w2_` and E = 1.
    E counts the experts that are present. weights, input_activations, dtype, format: as in Checkpoint; the input
    of the second projection is quantized like that of the first. hidden, intermediate: H and I, which packed
    words do not tell. activation: between the projections. top_k, experts: of the router, global.
    expert_map: int32 (experts), the place of each in the tensors or -1, None where all are present in order.
    weights_on_input: the router's weights multiply the input of the experts instead of their output (top_k 1 only).
    routed_scaling_factor: multiplies the sum of the routed experts, not the shared one.
    """

    tensors: Mapping[str, Any]
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None
    dtype: str
    hidden: int
    intermediate: int
    activation: GatedActivation
    experts: int
    top_k: int
    expert_map: Any = None
    weights_on_input: bool = False
    routed_scaling_factor: float = 1.0
    format: str = "pack-quantized"

    def arrays(self) -> dict[str, Any]:
        """All its arrays by name, in a fixed order, the expert map last."""
        found = dict(sorted(self.tensors.items()))
        return found if self.expert_map is None else {**found, "expert_map": self.expert_map}


class Backend(Protocol):
    """The required part; the operations of the module's docstring are looked up by name."""

    name: str

    def supports(self, case: Case) -> Support: ...


def device_of(backend: Backend) -> str:
    return str(getattr(backend, "device", "cpu"))


def arrays_of(backend: Backend) -> str:
    return str(getattr(backend, "arrays", "torch"))


def contract_of(backend: Backend, case: Case | None = None) -> Contract:
    """What a backend promises; of a case, where it says so case by case. Raises RunError for what is no Contract."""
    contract = getattr(backend, "contract", Contract())
    by_case = getattr(backend, "contract_for", None)
    if case is not None and callable(by_case):
        contract = by_case(case)
    if not isinstance(contract, Contract):
        raise RunError(f"backend {backend.name}: contract is a {type(contract).__name__}, not a Contract")
    return contract


def libraries_of(backend: Backend) -> tuple[str, ...]:
    return tuple(getattr(backend, "libraries", ()))


def nondeterminism_of(backend: Backend) -> str:
    return str(getattr(backend, "nondeterministic", ""))


def known_backends() -> dict[str, str]:
    """Name -> `module:attribute`: our own, and those that installed packages announce."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)} | _OUR_OWN | _ON_CUDA


def cuda_backends() -> list[str]:
    """The names of our own adapters that need a GPU."""
    return list(_ON_CUDA)


def load_backend(spec: str) -> Backend:
    """Find a backend by name, `module:attribute` or `path/to/file.py:attribute`.

    The attribute is a backend, or a class or function that makes one without arguments. Raises RunError
    (unknown name, broken file, no such attribute, not a backend) and EnvironmentMissing (a module it
    imports is not installed).
    """
    target = known_backends().get(spec, spec)
    if ":" not in target:
        known = ", ".join(sorted(known_backends()))
        raise RunError(
            f"backend {spec!r} is unknown; known: {known}; or give module:attribute or file.py:attribute"
        )
    place, _, attribute = target.rpartition(":")
    module = _import(spec, place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise RunError(f"backend {spec!r}: {place} has no attribute {attribute!r}")
        found = getattr(found, part)
    if not hasattr(found, "supports") or isinstance(found, type):
        found = _call(spec, found)
    return _checked(spec, found)


def from_anywhere(spec: str) -> str:
    """The spec, with the whole path where it names a file of the folder that it was given in."""
    place, _, attribute = spec.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else spec


def _import(spec: str, place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        if not path.is_file():
            raise RunError(f"backend {spec!r}: there is no file {place}")
        name = f"quantcts_backend_{path.stem}"
        module_spec = importlib.util.spec_from_file_location(name, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        module_spec.loader.exec_module(module)
        return module
    except SyntaxError as error:
        raise RunError(f"backend {spec!r}: {error.filename}:{error.lineno}: {error.msg}") from error
    except ModuleNotFoundError as error:
        if error.name == place:
            raise RunError(f"backend {spec!r}: there is no module {place}") from error
        raise EnvironmentMissing(
            f"backend {spec!r} needs the module {error.name!r}, which is not installed"
            + _remedy(str(error.name))
        ) from error
    except RunError:
        raise
    except (Exception, SystemExit) as error:
        raise RunError(
            f"backend {spec!r}: importing {place} raised {type(error).__name__}: {error}"
        ) from error


def _remedy(module: str) -> str:
    extra = {"torch": "torch", "compressed_tensors": "torch", "humming": "humming"}.get(module.split(".")[0])
    return f": pip install 'quantcts[{extra}]'" if extra else ""


def _call(spec: str, factory: Any) -> Any:
    if not callable(factory):
        return factory
    try:
        return factory()
    except (RunError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentMissing(
            f"backend {spec!r}: it could not be made: {type(error).__name__}: {error}"
        ) from error


def _checked(spec: str, found: Any) -> Backend:
    if not isinstance(getattr(found, "name", None), str) or not callable(getattr(found, "supports", None)):
        raise RunError(
            f"backend {spec!r}: a {type(found).__name__} is no backend; it needs `name` and `supports(case)`"
        )
    if arrays_of(found) not in ("torch", "numpy"):
        raise RunError(f"backend {spec!r}: arrays is {arrays_of(found)!r}; say 'torch' or 'numpy'")
    if not re.fullmatch(r"[\w.-]+", found.name):
        raise RunError(
            f"backend {spec!r}: the name {found.name!r} is not of letters, digits, '_', '.' and '-'"
        )
    contract_of(found)
    if arrays_of(found) == "torch":
        _check_device(spec, device_of(found))
    backend: Backend = found
    return backend


def _check_device(spec: str, device: str) -> None:
    try:
        import torch

        torch.empty(1, device=device)
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(f"backend {spec!r} takes torch tensors" + _remedy("torch")) from error
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentMissing(
            f"backend {spec!r}: torch has no device {device!r} here: {reason}"
        ) from error
