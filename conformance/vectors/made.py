"""From cases and the oracle to a set of vectors, the same bytes everywhere.

What is written depends on the cases and the oracle alone: names of tensors are digests of what they hold, orders are
those of the matrix, and numbers are rounded to the dtype of an answer, where the last bits of a float64 sum are gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import MoeCheckpoint
from conformance.cases import Case
from conformance.compare import LegalQuantizations, legal_of
from conformance.data import (
    generators,
    linear_problem,
    moe_problem,
    quantization_problem,
    quantized_weight,
    swiglu_problem,
)
from conformance.data.routing import routing_problem
from conformance.installed import installed
from conformance.sources.asked import BadCodes
from conformance.sources.computed import Computed
from conformance.vectors import layouts
from conformance.vectors.bounded import Alternative, NotStorable, stored
from conformance.vectors.chosen import chosen, contracts_of
from conformance.vectors.contracts import CONTRACTS, canonical
from conformance.vectors.document import MANIFEST, SCHEMA_VERSION, text_of
from conformance.vectors.flags import FLAGS, flags_of
from conformance.vectors.formats import file_of, format_of, moe_fields
from conformance.vectors.tensors import dtype_name, encode
from reference.bounds import Contract, Expected
from reference.rounding import E4M3
from reference.routing import AcceptableRoutes, align
from reference.weights import dequantize

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

# Of the set. A change of expected values is a major version: fixtures/CHANGELOG.md says what changed.
VERSION = "1.0.1"
FILES = (
    "packing", "layouts", "dequantize", "activation_quantization", "linear", "routing", "swiglu", "moe", "sharding"
)  # fmt: skip
# Beyond so many acceptable selections a token is no matter of listing them.
_MOST_SELECTIONS = 256

_REASONS = {
    "code-range": "a code lies outside the range of its width; packed, it would run over into its neighbour",
    "word-count": "a row has a word too few for its codes",
    "zero-words": "a column of zero points has a word too few",
    "scale-nan": "a scale is NaN",
    "scale-inf": "a scale is infinite",
    "scale-shape": "a group has no scale: the scale table lacks a column",
    "group-remainder": "groups of 64 do not divide K",
    "illegal": "the ranks would cut inside a word, a column or a group of scales",
}


class Set:
    """Collects vectors and their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensors] = {f"{name}.safetensors": {} for name in FILES}
        self.vectors: list[dict[str, Any]] = []

    def add(self, record: Mapping[str, Any], file: str) -> None:
        """record: a vector with arrays in the place of references."""
        name = f"{file}.safetensors"
        made = {**record, "file": name}
        for field in ("inputs", "control"):
            if field in made:
                made[field] = self._refer(name, made[field])
        if "expected" in made:
            made["expected"] = [{**e, "tensors": self._refer(name, e["tensors"])} for e in made["expected"]]
        self.vectors.append(made)

    def _refer(self, file: str, tensors: Tensors) -> dict[str, Any]:
        return {role: self._kept(file, role, tensors[role]) for role in sorted(tensors)}

    def _kept(self, file: str, role: str, array: Array) -> dict[str, Any]:
        dtype, shape = dtype_name(array), list(array.shape)
        content = np.ascontiguousarray(array).tobytes()
        name = hashlib.sha256(f"{dtype} {shape} ".encode() + content).hexdigest()[:12]
        known = self.tensors[file].setdefault(name, array)
        if known.dtype != array.dtype or known.shape != array.shape or known.tobytes() != content:
            raise AssertionError(f"{file}: {role}: two tensors share the name {name}; make names longer")
        return {"tensor": name, "dtype": dtype, "shape": shape}


def make(cases: Iterable[Case] | None = None) -> dict[str, bytes]:
    """The files of a set by name: one of tensors an operation, and the manifest."""
    made = Set()
    for case in chosen().values() if cases is None else cases:
        made.add(_record(case), file_of(case))
    if cases is None:
        for record in layouts.records():
            made.add(record, "layouts")
    files = {name: encode(tensors) for name, tensors in made.tensors.items() if tensors}
    return {**files, MANIFEST: text_of(_document(made.vectors, files))}


def _document(vectors: list[dict[str, Any]], files: Mapping[str, bytes]) -> dict[str, Any]:
    used = {flag for vector in vectors for flag in vector["flags"]}
    return {
        "schema": SCHEMA_VERSION,
        "version": VERSION,
        "suite": installed("quantcts") or "0.1.0",
        "specification": "docs/specification.md",
        "contracts": {name: asdict(contract) for name, contract in CONTRACTS.items()},
        "flags": {name: flag.to_json() for name, flag in FLAGS.items() if name in used} | layouts.FLAGS,
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in files.items()
        },
        "vectors": vectors,
    }


# ---- one vector


def _record(case: Case) -> dict[str, Any]:
    try:
        inputs, extra, entries, control = parts(case, {name: CONTRACTS[name] for name in contracts_of(case)})
    except NotStorable as error:
        raise AssertionError(f"{case.id}: no vector: {error}; choose another case") from error
    expected = {role: array for _, tensors, _ in entries for role, array in tensors.items()}
    record: dict[str, Any] = {
        "id": case.id,
        "operation": case.operation,
        "result": "invalid" if control else "valid",
        "format": {**format_of(case), **extra},
        "clauses": list(case.clauses),
        "flags": flags_of(case, inputs, expected),
        "comment": _comment(case),
        "inputs": inputs,
    }
    if control:
        return {**record, "control": control, "reason": _REASONS[case.recipe]}
    record["expected"] = [
        {"alternatives": [a.to_json() for a in alternatives], **more, "tensors": tensors}
        for alternatives, tensors, more in entries
    ]
    return record


Entry = tuple[list[Alternative], Tensors, dict[str, Any]]
Parts = tuple[Tensors, dict[str, Any], list[Entry], Tensors]
Contracts = Mapping[str, Contract]


def parts(case: Case, contracts: Contracts) -> Parts:
    """Inputs, what the format has beside what the case says, the entries of what is expected, the control.

    contracts: under which something is expected, by name; without any, the entries of bounded answers are left out.
    Raises NotStorable for what tensors cannot say.
    """
    exact = {
        "packing": _packing,
        "dequantize": _dequantize,
        "validation": _validation,
        "moe_align": _align,
        "sharding": _sharding,
    }
    if case.operation in exact:
        return exact[case.operation](case)
    own = {name: canonical(contract, case) for name, contract in contracts.items()}
    return {
        "activation_quantization": _quantization,
        "linear": _linear,
        "routing": _routing,
        "swiglu": _swiglu,
        "moe": _moe,
        "moe_parallel": _moe,  # of the whole layer
    }[case.operation](case, own)


def _exact(tensors: Tensors, **more: Any) -> Entry:
    """One alternative, whatever a contract promises."""
    return [Alternative("exact", tuple(CONTRACTS), True)], tensors, more


def _packing(case: Case) -> Parts:
    asked = Computed().packing(case)
    return {"codes": asked.codes}, {}, [_exact({"words": asked.words})], {}


def _dequantize(case: Case) -> Parts:
    weight = quantized_weight(case, generators(case)[0])
    tensors = dict(Computed().dequantize(case).checkpoint.tensors)
    return tensors, {}, [_exact({"weight": dequantize(weight)})], {}


def _bounded(contracts: Contracts, expected: Callable[[Contract], Expected]) -> list[Entry]:
    if not contracts:
        return []
    alternatives, tensors = stored({name: expected(contract) for name, contract in contracts.items()})
    return [(alternatives, tensors, {})]


def _linear(case: Case, contracts: Contracts) -> Parts:
    problem = linear_problem(case)
    inputs = dict(problem.checkpoint.tensors)
    inputs |= {f"x{i}": x for i, x in enumerate(problem.batches)}
    return inputs, {}, _bounded(contracts, problem.expected), {}


def _swiglu(case: Case, contracts: Contracts) -> Parts:
    problem = swiglu_problem(case)
    return {"x": problem.x}, {}, _bounded(contracts, problem.expected), {}


def _moe(case: Case, contracts: Contracts) -> Parts:
    problem = moe_problem(case)
    inputs = _layer(problem.checkpoint)
    for i, (x, weights, ids) in enumerate(problem.calls):
        inputs |= {f"x{i}": x, f"weights{i}": weights, f"ids{i}": ids}
    return inputs, moe_fields(problem.checkpoint), _bounded(contracts, problem.expected), {}


def _layer(checkpoint: MoeCheckpoint) -> Tensors:
    return dict(checkpoint.arrays())


def _validation(case: Case) -> Parts:
    asked = Computed().validation(case)
    if isinstance(asked, BadCodes):
        return {"codes": asked.bad}, {"words": list(asked.words)}, [], {"codes": asked.good}
    bad, good = ({**layer.tensors, "x0": asked.x} for layer in (asked.bad, asked.good))
    extra = {"weights": dict(asked.bad.weights), "control_weights": dict(asked.good.weights)}
    return bad, extra, [], good


def _sharding(case: Case) -> Parts:
    asked = Computed().sharding(case)
    extra = moe_fields(asked.layer)
    if asked.control is not None:
        sizes = {"hidden": asked.control.hidden, "intermediate": asked.control.intermediate}
        return _layer(asked.layer), {**extra, "control_sizes": sizes}, [], _layer(asked.control)
    entries = [
        _exact(_layer(shard.right), rank=shard.rank, intermediate=shard.right.intermediate)
        for shard in asked.shards
    ]
    return _layer(asked.layer), extra, entries, {}


def _align(case: Case) -> Parts:
    asked = Computed().moe_align(case)
    inputs = {"ids": asked.ids}
    if asked.expert_map is not None:
        inputs["expert_map"] = asked.expert_map
    right = align(asked.ids, case.experts, case.block, asked.expert_map)
    names = ("sorted_ids", "expert_ids", "num_tokens_post_pad")
    return inputs, {}, [_exact(dict(zip(names, right.arrays, strict=True)))], {}


def _quantization(case: Case, contracts: Contracts) -> Parts:
    problem = quantization_problem(case)
    found: dict[tuple[bytes, ...], tuple[str, list[str], Tensors]] = {}
    zero = None
    for label, contract in contracts.items():
        legal = legal_of(problem.x, case.activation, contract.quantizer, problem.input_scale)
        zero = legal.zero
        for name, tensors in _legal_tensors(case, legal):
            key = tuple(array.tobytes() for array in tensors.values())
            _, labels, _ = found.setdefault(key, (name, [], tensors))
            labels.append(label)
    assert zero is not None
    alternatives = [Alternative(name, tuple(labels), True) for name, labels, _ in found.values()]
    each = [tensors for _, _, tensors in found.values()]
    stacked = {role: np.stack([tensors[role] for tensors in each]) for role in each[0]}
    stacked["zero"] = zero
    return {"x": problem.x}, {"input_scale": problem.input_scale}, [(alternatives, stacked, {})], {}


def _legal_tensors(case: Case, legal: LegalQuantizations) -> Iterable[tuple[str, Tensors]]:
    dtype = E4M3.dtype if case.activation.kind == "fp8" else np.dtype(np.int8)
    for name, candidate in legal.results.items():
        low, high = legal.ends(candidate)
        codes, scale, *zero = candidate.stored(case.activation)
        tensors = {"codes": codes, "scale": scale}
        tensors |= {"code_low": low.astype(dtype), "code_high": high.astype(dtype)}
        yield name, tensors | ({"zero_point": zero[0]} if zero else {})


def _routing(case: Case, contracts: Contracts) -> Parts:
    problem = routing_problem(case)
    found: dict[tuple[bytes, ...], tuple[list[str], Tensors]] = {}
    for label, contract in contracts.items():
        tensors = _selections(case, problem.acceptable(contract))
        if tensors is None:
            continue
        key = tuple(array.tobytes() for array in tensors.values())
        found.setdefault(key, ([], tensors))[0].append(label)
    if contracts and not found:
        raise NotStorable("a token has too many selections")
    inputs = {"logits": problem.logits} | ({} if problem.bias is None else {"bias": problem.bias})
    entries: list[Entry] = [
        ([Alternative("selections", tuple(labels), False)], tensors, {}) for labels, tensors in found.values()
    ]
    return inputs, {}, entries, {}


def _selections(case: Case, acceptable: AcceptableRoutes) -> Tensors | None:
    """Every acceptable selection of every token, the plain one first, and the float32 weights next inside the ends.
    None where a token has too many to list: many experts whose ties a contract leaves open."""
    tokens, rows = [], []
    for token in range(case.m):
        plain = tuple(sorted(int(i) for i in acceptable.ids[token]))
        listed = acceptable.selections(token, _MOST_SELECTIONS + 1)
        if len(listed) > _MOST_SELECTIONS or plain not in listed:
            return None
        own = [plain, *(selection for selection in listed if selection != plain)]
        tokens += [token] * len(own)
        rows += own
    ids = np.array(rows, np.int64).reshape(-1, case.top_k)
    owners = np.array(tokens, np.int64)
    low, high = np.zeros(ids.shape), np.zeros(ids.shape)
    for place in range(max(tokens.count(t) for t in set(tokens)) if tokens else 0):
        # weights_between takes a selection of each token: those of one place in their lists, the plain one elsewhere
        first = np.searchsorted(owners, np.arange(case.m))
        count = np.bincount(owners, minlength=case.m)
        at = first + np.where(place < count, place, 0)
        low[at], high[at] = acceptable.weights_between(ids[at])
    return {
        "token": owners.astype(np.int32),
        "ids": ids.astype(np.int32),
        "weight_low": _inward(low, np.inf),
        "weight_high": _inward(high, -np.inf),
    }


def _inward(ends: npt.NDArray[np.float64], towards: float) -> npt.NDArray[np.float32]:
    """The float32 numbers next to the ends, on the inner side: for weights in float32 they say the same."""
    near = ends.astype(np.float32)
    outside = near < ends if towards > 0 else near > ends
    return np.where(outside, np.nextafter(near, np.float32(towards)), near).astype(np.float32)


def _comment(case: Case) -> str:
    """What a person reads of a vector."""
    layer = f"{case.weight.name}{', g_idx' if case.act_order else ''}"
    return {
        "packing": f"{case.weight.bits}-bit codes, {case.recipe}, packed along dimension {case.dim}",
        "dequantize": f"the matrix that a {layer} checkpoint means, in {case.dtype}",
        "activation_quantization": f"{case.activation.name} of {case.dtype} activations, {case.recipe}",
        "linear": f"a {layer} layer, {case.activation.name} activations, {case.dtype}, {case.recipe}",
        "validation": f"a {layer} layer with one defect: {case.recipe}",
        "routing": f"{case.routing.name if case.routing else ''}, {case.dtype} logits, {case.recipe}",
        "moe_align": f"blocks of {case.block} slots of one expert, {case.recipe}",
        "swiglu": f"{case.variant} of {case.dtype} numbers, {case.recipe}",
        "moe": f"a {layer} layer of {case.experts} experts, {case.activation.name}, {case.variant}, {case.recipe}",
        "sharding": f"a {layer} layer of {case.experts} experts over {case.ranks}, {case.recipe}",
    }[case.operation]
