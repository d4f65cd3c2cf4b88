"""A case judged by its suite without pytest: for tools, and for tests of backends."""

from __future__ import annotations

import contextlib
from typing import Any

from conformance.backend import Backend
from conformance.cases import Case
from conformance.judge import Judge
from conformance.subject import Subject
from conformance.suites import (
    test_activation_quantization,
    test_conduct,
    test_dequantize,
    test_linear,
    test_moe,
    test_packing,
    test_routing,
    test_sharding,
    test_swiglu,
    test_validation,
)
from conformance.verdict import Verdict

SUITES: dict[str, Any] = {
    "packing": test_packing.test_packing,
    "dequantize": test_dequantize.test_dequantize,
    "activation_quantization": test_activation_quantization.test_activation_quantization,
    "linear": test_linear.test_linear,
    "validation": test_validation.test_validation,
    "routing": test_routing.test_routing,
    "moe_align": test_routing.test_moe_align,
    "swiglu": test_swiglu.test_swiglu,
    "moe": test_moe.test_moe,
    "sharding": test_sharding.test_sharding,
    "conduct": test_conduct.test_conduct,
}


class _Refused(Exception):
    """The suite has its verdict; a step that fails ends a case of several."""


def judged(backend: Backend, case: Case, spec: str = "") -> Verdict | None:
    """The verdict of the case's suite. spec: how to find the backend again, for checks that load it anew."""

    def end(verdict: Verdict) -> None:
        raise _Refused

    subject = Subject(backend, case, spec)
    judge = Judge(subject, end)
    with contextlib.suppress(_Refused):
        SUITES[case.operation](case, subject, judge)
    return judge.verdict
