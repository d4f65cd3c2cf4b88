"""Right backends that break their process in one case, or are not what they say: for the isolation of hosts.

`w3` cases break it, the others are computed by the oracle's own backend.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import replace
from pathlib import Path

from conformance.backends.numpy import NumpyBackend
from reference.bounds import Contract
from reference.semantics import RIGHT


class Breaking(NumpyBackend):
    def load_linear(self, checkpoint):
        if checkpoint.weights["num_bits"] == 3:
            self.break_()
        return super().load_linear(checkpoint)


class segfault(Breaking):
    name = "segfault"

    def break_(self):
        ctypes.string_at(0)


class exits(Breaking):
    name = "exits"

    def break_(self):
        os._exit(7)


class hangs(Breaking):
    name = "hangs"

    def break_(self):
        time.sleep(600)


class out_of_memory(Breaking):
    name = "out_of_memory"

    def break_(self):
        raise MemoryError("cannot allocate 80 GiB")


class no_process(Breaking):
    """It can be loaded once; every other process of it dies while it is loaded."""

    name = "no_process"

    def __init__(self):
        self.mark = Path(os.environ["QUANTCTS_TEST_MARK"])
        if self.mark.exists():
            os._exit(9)
        self.mark.touch()

    def break_(self):
        os._exit(7)


class dies_on_loading(Breaking):
    name = "dies_on_loading"

    def __init__(self):
        os._exit(5)


class prepares(NumpyBackend):
    """Compiles, and says so; its answer is wrong unless it has."""

    name = "prepares"
    compiled = ()

    def prepare(self, cases, workers):
        for case in cases:
            self.compiled = (*self.compiled, case.weight.bits)
            yield f"kernel of {case.weight.bits} bits"

    def load_linear(self, checkpoint):
        if checkpoint.weights["num_bits"] not in self.compiled:
            raise RuntimeError("not compiled for these bits")
        return super().load_linear(checkpoint)


class looks_for_pytest(NumpyBackend):
    """A library that changes its heuristics when it is tested."""

    name = "looks_for_pytest"

    def load_linear(self, checkpoint):
        if any(name.startswith("PYTEST_") for name in os.environ):
            raise RuntimeError("under pytest other kernels are chosen")
        return super().load_linear(checkpoint)


class refuses_to_say(NumpyBackend):
    """Of 3 bits it cannot even say whether it supports them."""

    name = "refuses_to_say"

    def supports(self, case):
        if case.weight.bits == 3:
            raise KeyError("no entry for 3 bits")
        return super().supports(case)


class fails_to_prepare(NumpyBackend):
    name = "fails_to_prepare"

    def prepare(self, cases, workers):
        yield ""
        raise RuntimeError("the compiler is not there")


class rounds_3_bits(NumpyBackend):
    """Rounds its weights to 16 bits, for 3 bits alone, and says so."""

    name = "rounds_3_bits"
    contract = Contract(weights="exact", intermediates="fp32")

    def contract_for(self, case):
        return replace(self.contract, weights="rounded" if case.weight.bits == 3 else "exact")

    def load_linear(self, checkpoint):
        weights = "rounded" if checkpoint.weights["num_bits"] == 3 else "exact"
        return NumpyBackend.of("", RIGHT, replace(self.contract, weights=weights)).load_linear(checkpoint)
