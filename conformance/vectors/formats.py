"""What a manifest says of a case: the fields of `format` that the case alone determines.

A vector has more where data decide: the scale of a static quantizer, the parameters of a layer of experts. `read_*`
make of a format what the judge works with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from conformance.backend import Checkpoint, MoeCheckpoint
from conformance.cases import Case
from reference.swiglu import GatedActivation

LAYOUT = "ct-dense-le-v1"
Tensors = Mapping[str, Any]


def file_of(case: Case) -> str:
    """The operation whose file holds a case's vector: bad data stand with what they are bad for."""
    if case.operation == "validation":
        return "packing" if case.recipe == "code-range" else "linear"
    return {"moe_align": "routing"}.get(case.operation, case.operation)


def format_of(case: Case) -> dict[str, Any]:
    args, inputs = case.weight.to_quantization_args(), case.activation.to_quantization_args()
    layer = {"layout": LAYOUT, "weights": args, "dtype": case.dtype}
    if case.operation == "packing" or case.recipe == "code-range":
        stack = [case.experts] if case.experts else []
        shape = [*stack, case.n, case.k]
        return {"layout": LAYOUT, "bits": case.weight.bits, "axis": case.dim - 2, "shape": shape}
    if case.operation == "activation_quantization":
        return {"input_activations": inputs, "dtype": case.dtype, "m": case.m, "k": case.k}
    if case.operation == "routing":
        return {
            "routing": asdict(case.routing) if case.routing else {},
            "dtype": case.dtype,
            "tokens": case.m,
        }
    if case.operation == "moe_align":
        return {"tokens": case.m, "experts": case.experts, "top_k": case.top_k, "block": case.block}
    if case.operation == "swiglu":
        return {
            "activation": case.gated.to_config(), "dtype": case.dtype, "m": case.m, "intermediate": case.n
        }  # fmt: skip
    if case.operation == "dequantize":
        return {**layer, "n": case.n, "k": case.k}
    if case.operation == "validation":
        return {"layout": LAYOUT, "dtype": case.dtype, "input_activations": None, "n": case.n, "k": case.k}
    if case.operation == "linear":
        return {
            **layer,
            "input_activations": inputs,
            "m": case.m,
            "n": case.n,
            "k": case.k,
            "bias": case.bias,
        }
    sizes = {"experts": case.experts, "hidden": case.k, "intermediate": case.n}
    if case.operation == "sharding":
        return {**layer, **sizes, "ranks": case.ranks}
    return {**layer, "input_activations": inputs, **sizes, "tokens": case.m, "top_k": case.top_k}


def moe_fields(checkpoint: MoeCheckpoint) -> dict[str, Any]:
    """What a layer of experts is beside its tensors."""
    return {
        "weights": dict(checkpoint.weights),
        "input_activations": checkpoint.input_activations and dict(checkpoint.input_activations),
        "dtype": checkpoint.dtype,
        "hidden": checkpoint.hidden,
        "intermediate": checkpoint.intermediate,
        "experts": checkpoint.experts,
        "top_k": checkpoint.top_k,
        "activation": checkpoint.activation.to_config(),
        "weights_on_input": checkpoint.weights_on_input,
        "routed_scaling_factor": checkpoint.routed_scaling_factor,
    }


def read_layer(fields: Mapping[str, Any], tensors: Tensors) -> Checkpoint:
    return Checkpoint(dict(tensors), fields["weights"], fields.get("input_activations"), fields["dtype"])


def read_experts(fields: Mapping[str, Any], tensors: Tensors) -> MoeCheckpoint:
    """tensors: those of the layer, the expert map among them where there is one."""
    return MoeCheckpoint(
        {name: array for name, array in tensors.items() if name != "expert_map"},
        fields["weights"],
        fields["input_activations"],
        fields["dtype"],
        fields["hidden"],
        fields["intermediate"],
        GatedActivation.from_config(dict(fields["activation"])),
        fields["experts"],
        fields["top_k"],
        tensors.get("expert_map"),
        fields["weights_on_input"],
        float(fields["routed_scaling_factor"]),
    )
