"""Which tensors a vector has, and their dtypes and shapes: what a reader may rely on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from conformance.cases import Case
from conformance.vectors.document import Vector
from conformance.vectors.formats import format_of, read_experts
from conformance.vectors.tensors import VectorError, dtype_name, sizes
from reference.errors import QuantizationError
from reference.packing import packed_size
from reference.sharding import Ranks

Array = npt.NDArray[Any]
Shape = tuple[int | None, ...]
# role -> dtype, shape with None for any length, whether it must be there
Roles = dict[str, tuple[str, Shape, bool]]

_FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def check_roles(vector: Vector, case: Case) -> None:
    """Raises VectorError for a vector of a case whose tensors are not those of its operation."""
    if vector.valid == (vector.operation == "validation" or case.recipe == "illegal"):
        raise VectorError(
            f"{vector.place}: result: not that of the case, whose data are bad or good by its recipe"
        )
    bad = vector.operation == "validation"
    inputs = _inputs(case)
    _check(f"{vector.place}: inputs", vector.inputs, _of_any_shape(inputs) if bad else inputs)
    if not vector.valid:
        _check(f"{vector.place}: control", vector.control, inputs if bad else _of_any_shape(inputs))
        if vector.expected or not vector.reason:
            raise VectorError(f"{vector.place}: an invalid vector has a reason and nothing expected")
        return
    if vector.control or not vector.expected:
        raise VectorError(f"{vector.place}: a valid vector has something expected and no control")
    ranks = [entry.rank for entry in vector.expected]
    if vector.operation == "sharding" and ranks != list(range(Ranks.parse(case.ranks).count)):
        raise VectorError(
            f"{vector.place}: expected: the ranks are {ranks}, not all of {case.ranks} in order"
        )
    for number, entry in enumerate(vector.expected):
        place = f"{vector.place}: expected/{number}"
        if vector.operation == "sharding":
            _check_shard(place, vector, entry.intermediate, entry.tensors)
        else:
            _check(f"{place}: tensors", entry.tensors, _expected(case, len(entry.alternatives)))
        if vector.operation == "routing":
            _check_rows(place, case, entry.tensors)


def _of_any_shape(roles: Roles) -> Roles:
    """A defect may be a shape; what controls an illegal cut is another layer."""
    return {role: (dtype, (None,) * len(shape), needed) for role, (dtype, shape, needed) in roles.items()}


# What a layer of experts is beside its tensors and what its case says: field -> its type
_EXPERTS: dict[str, type | tuple[type, ...]] = {
    "activation": dict,
    "weights_on_input": bool,
    "routed_scaling_factor": (int, float),
    "top_k": int,
    "input_activations": (dict, type(None)),
}


def check_extra(vector: Vector, case: Case) -> None:
    """Raises VectorError for a format whose fields beyond those of the case have no meaning."""
    wanted: dict[str, type | tuple[type, ...]] = {}
    if case.operation == "activation_quantization":
        wanted["input_scale"] = float if not case.activation.dynamic else type(None)
    if case.operation in ("moe", "sharding"):
        wanted |= _EXPERTS
    if case.recipe == "illegal":
        wanted["control_sizes"] = dict
    if case.operation == "validation":
        wanted |= (
            {"words": list} if case.recipe == "code-range" else {"weights": dict, "control_weights": dict}
        )
    known = format_of(case)
    for name in wanted.keys() | vector.format.keys():
        value = vector.format.get(name)
        if name not in wanted and name not in known:
            raise VectorError(f"{vector.place}: format/{name}: no field of such a vector; remove it")
        if name in wanted and (name not in vector.format or not isinstance(value, wanted[name])):
            raise VectorError(f"{vector.place}: format/{name}: {str(value)[:60]!r} is no value of it")
    if case.recipe == "code-range":
        sizes(f"{vector.place}: format/words", vector.format["words"])
    if case.recipe == "illegal":
        control = vector.format["control_sizes"]
        if set(control) != {"hidden", "intermediate"}:
            raise VectorError(f"{vector.place}: format/control_sizes: expected hidden and intermediate")
        sizes(f"{vector.place}: format/control_sizes", list(control.values()))
    if case.operation in ("moe", "sharding"):
        try:
            read_experts(vector.format, vector.inputs)
        except (QuantizationError, TypeError) as error:
            raise VectorError(f"{vector.place}: format: {error}") from error


def check_layout(vector: Vector) -> None:
    """Raises VectorError for a vector of a layout whose codes are not there."""
    n, k = (vector.format.get(name) for name in ("n", "k"))
    if not (isinstance(n, int) and isinstance(k, int) and vector.valid and len(vector.expected) == 1):
        raise VectorError(f"{vector.place}: expected a valid vector with n, k and one entry")
    groups = (n, None)
    roles: Roles = {
        "codes": ("I8", (n, k), True),
        "scale": ("F16", groups, True),
        "zero_points": ("I8", groups, False),
    }
    _check(f"{vector.place}: inputs", vector.inputs, roles)


def _check(place: str, found: Mapping[str, Array], roles: Roles) -> None:
    for role in found:
        if role not in roles:
            raise VectorError(
                f"{place}: {role!r} is no tensor of such a vector; those are {', '.join(roles)}"
            )
    for role, (dtype, shape, needed) in roles.items():
        array = found.get(role)
        if array is None:
            if needed:
                raise VectorError(f"{place}: the tensor {role!r} is missing")
            continue
        fits = len(shape) == array.ndim and all(
            a in (None, b) for a, b in zip(shape, array.shape, strict=True)
        )
        if not fits or dtype_name(array) != dtype:
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise VectorError(
                f"{place}/{role}: expected {dtype} [{wanted}], found {dtype_name(array)} {list(array.shape)}"
            )


def _inputs(case: Case) -> Roles:
    operation, real = case.operation, _FLOATS[case.dtype]
    stack: Shape = (case.experts,) if case.experts else ()
    if operation == "packing" or case.recipe == "code-range":
        return {"codes": ("I8", (*stack, case.n, case.k), True)}
    if operation in ("dequantize", "linear", "validation"):
        roles = _weight("", case, case.n, case.k, ())
        roles["weight_shape"] = ("I64", (2,), True)
        if operation == "linear":
            roles["bias"] = (real, (case.n,), case.bias)
            roles |= {f"x{i}": (real, (case.m, case.k), True) for i in (0, 1)}
        if operation == "validation":
            roles["x0"] = (real, (None, case.k), True)
        return roles
    if operation == "activation_quantization":
        return {"x": (real, (case.m, case.k), True)}
    if operation == "swiglu":
        return {"x": (real, (case.m, 2 * case.n), True)}
    if operation == "routing":
        bias = case.routing is not None and case.routing.bias
        return {"logits": (real, (case.m, case.experts), True), "bias": ("F32", (case.experts,), bias)}
    if operation == "moe_align":
        return {
            "ids": ("I32", (case.m, case.top_k), True),
            "expert_map": ("I32", (case.experts,), "absent" in case.recipe),
        }
    roles = {}
    for prefix, count in (("", None), ("shared_", 1)):
        needed = not prefix or case.recipe == "shared"
        if needed:
            for which, n, k in (("w13", 2 * case.n, case.k), ("w2", case.k, case.n)):
                roles |= _weight(f"{prefix}{which}_", case, n, k, (count,))
                roles[f"{prefix}{which}_bias"] = (real, (count, n), case.bias)
    roles["expert_map"] = ("I32", (case.experts,), case.recipe == "absent")
    if operation == "moe":
        for i in (0, 1):
            roles[f"x{i}"] = (real, (case.m, case.k), True)
            roles[f"weights{i}"] = ("F32", (case.m, case.top_k), True)
            roles[f"ids{i}"] = ("I32", (case.m, case.top_k), True)
    return roles


def _weight(prefix: str, case: Case, n: int, k: int, stack: Shape) -> Roles:
    fmt = case.weight
    # What does not fit whole groups is there to be refused.
    groups = -(-k // fmt.group_size) if fmt.strategy == "group" else 1
    roles: Roles = {
        f"{prefix}weight_packed": ("I32", (*stack, n, packed_size(k, fmt.bits)), True),
        f"{prefix}weight_scale": (_FLOATS[case.dtype], (*stack, n, groups), True),
    }
    if not fmt.symmetric:
        roles[f"{prefix}weight_zero_point"] = ("I32", (*stack, packed_size(n, fmt.bits), groups), True)
    if case.act_order:
        roles[f"{prefix}weight_g_idx"] = ("I32", (*stack, k), True)
    return roles


def _expected(case: Case, count: int) -> Roles:
    operation, real = case.operation, _FLOATS[case.dtype]
    if operation == "packing":
        sizes: list[int | None] = [*([case.experts] if case.experts else []), case.n, case.k]
        place = case.dim - 2
        sizes[place] = packed_size(case.k if case.dim == 1 else case.n, case.weight.bits)
        return {"words": ("I32", tuple(sizes), True)}
    if operation == "dequantize":
        return {"weight": (real, (case.n, case.k), True)}
    if operation == "moe_align":
        return {
            "sorted_ids": ("I32", (None,), True),
            "expert_ids": ("I32", (None,), True),
            "num_tokens_post_pad": ("I32", (1,), True),
        }
    if operation == "routing":
        chosen = (None, case.top_k)
        return {
            "token": ("I32", (None,), True), "ids": ("I32", chosen, True),
            "weight_low": ("F32", chosen, True), "weight_high": ("F32", chosen, True),
        }  # fmt: skip
    if operation == "activation_quantization":
        fmt = case.activation
        codes = "F8_E4M3" if fmt.kind == "fp8" else "I8"
        group = fmt.strategy == "group"
        per = {
            "tensor": (1, 1),
            "token": (case.m, 1),
            "group": (case.m, case.k // fmt.group_size if group else 0),
        }
        every, scales = (count, case.m, case.k), (count, *per[fmt.strategy])
        roles: Roles = dict.fromkeys(("codes", "code_low", "code_high"), (codes, every, True))
        roles["scale"] = ("F32", scales, True)
        roles["zero"] = ("BOOL", per[fmt.strategy], True)
        if not fmt.symmetric:
            roles["zero_point"] = ("I32", scales, True)
        return roles
    rows, columns = (case.m, case.n) if operation == "swiglu" else (2 * case.m, case.n)
    whole = (count, rows, case.k if operation == "moe" else columns)
    return {
        "y": (real, whole, True),
        "low": (real, whole, False),
        "high": (real, whole, False),
        "tips": ("BOOL", whole, False),
    }


def _check_shard(place: str, vector: Vector, intermediate: int | None, tensors: Mapping[str, Array]) -> None:
    if intermediate is None:
        raise VectorError(f"{place}: intermediate: a shard says how many units its rank holds")
    for role, array in tensors.items():
        known = vector.inputs.get(role)
        if known is not None and (array.dtype != known.dtype or array.ndim != known.ndim):
            raise VectorError(
                f"{place}/{role}: {dtype_name(array)} {list(array.shape)} is no part of the layer's"
            )
        if known is None and role != "expert_map":
            raise VectorError(f"{place}/{role}: the layer has no such tensor")
    for role in vector.inputs:
        if role not in tensors and not role.startswith("shared_"):
            raise VectorError(f"{place}: the tensor {role!r} is missing")


def _check_rows(place: str, case: Case, tensors: Mapping[str, Array]) -> None:
    rows = {array.shape[0] for array in tensors.values()}
    tokens = tensors["token"].tolist()
    if len(rows) != 1 or sorted(set(tokens)) != list(range(case.m)):
        raise VectorError(
            f"{place}: token: expected a row or more for each of {case.m} tokens in all four tensors"
        )
