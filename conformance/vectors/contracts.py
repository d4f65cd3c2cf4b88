"""The promises under which vectors hold an expectation.

A backend's promise is compared with these where it matters: what a linear promises of router ties changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from conformance.cases import Case
from reference.bounds import Contract

CONTRACTS: dict[str, Contract] = {
    "default": Contract(),
    "rounded": Contract(weights="rounded", intermediates="fp32"),
    "exact-16": Contract(weights="exact", integers="int32", intermediates="16-bit"),
    "rounded-16": Contract(weights="rounded", integers="int32", intermediates="16-bit", ties="any"),
    "compressed-tensors": Contract(
        weights="rounded", quantizer="compressed-tensors", ties="any", intermediates="16-bit"
    ),
}

_ROUTER = ("ties", "router")
_LINEAR = ("weights", "zero_point", "epilogue", "partial_sums")


def relevant(case: Case) -> tuple[str, ...]:
    """The fields of a contract that what is right depends on."""
    operation, kind = case.operation, case.activation.kind
    if operation == "activation_quantization":
        return ("quantizer",)
    if operation == "routing":
        sigmoid = case.routing is not None and case.routing.scoring == "sigmoid"
        return (*_ROUTER, *(("sigmoid",) if sigmoid else ()))
    if operation == "swiglu":
        return ("intermediates", "sigmoid")
    if operation not in ("linear", "moe"):
        return ()
    found = _LINEAR if operation == "linear" else (*_LINEAR, "intermediates", "sigmoid")
    if kind != "a16":
        found = (*found, "quantizer", "accumulator" if kind == "fp8" else "integers")
    return found


def canonical(contract: Contract, case: Case) -> Contract:
    """The contract with the defaults in all fields that do not matter for the case."""
    return replace(Contract(), **{name: getattr(contract, name) for name in relevant(case)})


def names_of(contract: Contract, case: Case) -> list[str]:
    """The contracts above that promise the same for a case."""
    own = canonical(contract, case)
    return [name for name, known in CONTRACTS.items() if canonical(known, case) == own]
