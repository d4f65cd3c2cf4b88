"""vLLM's operators beside matrix products: quantizers, gated activations, routers, block alignment."""

from __future__ import annotations

from typing import Any

import torch

from conformance.backend import Support
from conformance.backends.vllm_ops import aligned, first_reason, launched, load
from conformance.cases import Case
from reference.bounds import Contract
from reference.formats import ActivationFormat
from reference.routing import Routing
from reference.swiglu import GatedActivation

_OPERATIONS = ("activation_quantization", "swiglu", "routing", "moe_align")
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# What vLLM hands the quantizer of groups as the least amax.
_LEAST_AMAX = 1e-10
# scoring_func of grouped_topk
_SIGMOID = 1
_MOST_GROUPS = _MOST_EXPERTS = 32


class VllmOperators:
    name = "vllm_ops"
    device = "cuda"
    kernels = "vllm::|per_token_group_quant"
    # intermediates: silu and GELU are rounded to 16 bits before the product with up; swigluoai_and_mul is not. sigmoid:
    # grouped_topk computes 0.5 tanh(0.5 l) + 0.5, the others an exponential.
    contract = Contract(intermediates="any", sigmoid="tanh")

    def __init__(self, distribution: str) -> None:
        self.libraries = (distribution,)

    def supports(self, case: Case) -> Support:
        if case.operation not in _OPERATIONS:
            return Support.no("only quantizers, gated activations, routers and block alignment")
        reason = ""
        if case.operation == "activation_quantization":
            reason = _no_quantizer(case.activation)
        elif case.operation == "swiglu":
            reason = _no_activation(case.gated)
        elif case.routing is not None:
            reason = _no_router(case.routing)
        return Support.no(reason) if reason else Support.yes()

    def quantize_activation(
        self, x: torch.Tensor, args: Any, input_scale: float | None
    ) -> list[torch.Tensor]:
        fmt = ActivationFormat.from_quantization_args(args)
        _refuse(_no_quantizer(fmt))
        return launched(_quantized(x, fmt, input_scale), x.device)

    def swiglu(self, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
        _refuse(_no_activation(activation))
        h = torch.empty((len(x), x.shape[1] // 2), dtype=x.dtype, device=x.device)
        limit = activation.limit
        if activation.arrangement == "interleaved":
            torch.ops._C.swigluoai_and_mul(h, x, activation.alpha, limit)
        elif limit is not None:
            torch.ops._C.silu_and_mul_with_clamp(h, x, limit, activation.alpha, activation.beta)
        elif activation.arrangement == "up-gate":
            torch.ops._C.mul_and_silu(h, x)
        elif activation.kind == "silu":
            torch.ops._C.silu_and_mul(h, x)
        elif activation.kind == "gelu":
            torch.ops._C.gelu_and_mul(h, x)
        else:
            torch.ops._C.gelu_tanh_and_mul(h, x)
        return launched(h, x.device)

    def route(self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Any:
        _refuse(_no_router(routing))
        if routing.groups > 1:
            found = torch.ops._moe_C.grouped_topk(
                logits, routing.groups, routing.top_groups, routing.top_k, routing.renormalize, routing.scaling,
                bias, _SIGMOID,
            )  # fmt: skip
            return launched(tuple(found), logits.device)
        shape, device = (len(logits), routing.top_k), logits.device
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        ids, rows = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        if routing.scoring == "sigmoid":
            torch.ops._moe_C.topk_sigmoid(
                weights, ids, rows, logits, routing.renormalize, bias, routing.scaling
            )
        else:
            torch.ops._moe_C.topk_softmax(weights, ids, rows, logits, routing.normalized, bias)
        return launched((weights, ids), device)

    def align_block_size(
        self, ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return launched(aligned(ids, experts, block, expert_map), ids.device)


def _refuse(reason: str) -> None:
    if reason:
        raise NotImplementedError(reason)


def _no_quantizer(fmt: ActivationFormat) -> str:
    known = ("a-int8", "a-int8-asym", "a-fp8", "a-fp8-static", "a-fp8-g128")
    return "" if fmt.name in known else f"vLLM's operators have no quantizer of {fmt.name}"


def _no_activation(gated: GatedActivation) -> str:
    halves = gated.arrangement != "interleaved"
    plain = gated.limit is None
    return first_reason(
        (
            gated.clamp == "after",
            "the limit behind the activation is a kernel of Triton in vLLM, no operator",
        ),
        (
            not halves and (gated.kind != "silu" or plain or gated.beta != 1),
            "interleaved gate and up: silu with a limit and beta 1 only",
        ),
        (gated.kind != "silu" and (not plain or gated.beta != 0), "GELU has no limit and no beta"),
        (halves and plain and (gated.alpha != 1 or gated.beta != 0), "alpha and beta need a limit"),
        (
            gated.arrangement == "up-gate" and (gated.kind != "silu" or not plain),
            "up before gate: plain silu only",
        ),
    )


def _no_router(routing: Routing) -> str:
    grouped = routing.groups > 1
    return first_reason(
        (
            grouped
            and (routing.group_score != "sum-of-two" or not routing.bias or routing.scoring != "sigmoid"),
            "grouped_topk scores sigmoids and takes a bias; a group counts by the sum of its two best experts",
        ),
        (grouped and routing.groups > _MOST_GROUPS, f"grouped_topk has at most {_MOST_GROUPS} groups"),
        (grouped and routing.top_k > _MOST_EXPERTS, f"grouped_topk chooses at most {_MOST_EXPERTS} experts"),
        (
            not grouped and routing.scoring != "sigmoid" and routing.scaling != 1,
            "topk_softmax takes no scaling factor",
        ),
    )


def _quantized(x: torch.Tensor, fmt: ActivationFormat, input_scale: float | None) -> list[torch.Tensor]:
    if fmt.kind == "int8":
        codes = torch.empty_like(x, dtype=torch.int8)
        scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
        zero_point = None if fmt.symmetric else torch.empty_like(scale, dtype=torch.int32)
        torch.ops._C.dynamic_scaled_int8_quant(codes, x, scale, zero_point)
        return [codes, scale] if zero_point is None else [codes, scale, zero_point]
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if not fmt.dynamic:
        scale = torch.full((1, 1), float(input_scale or 0), dtype=torch.float32, device=x.device)
        torch.ops._C.static_scaled_fp8_quant(codes, x, scale, None)
    elif fmt.strategy == "group":
        shape = (len(x), x.shape[1] // fmt.group_size)
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
        torch.ops._C.per_token_group_fp8_quant(
            x, codes, scale, fmt.group_size, _LEAST_AMAX, -_LARGEST, _LARGEST, False, False, False
        )
    else:
        scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)
    return [codes, scale]


def backend() -> VllmOperators:
    return VllmOperators(
        load(
            ("_C.dynamic_scaled_int8_quant", "_C.per_token_group_fp8_quant", "_C.silu_and_mul_with_clamp",
             "_moe_C.topk_sigmoid", "_moe_C.grouped_topk", "_moe_C.moe_align_block_size")
        )
    )  # fmt: skip
