"""What only a GPU can show: broken contexts stay with one case, and it is seen which kernels ran.

Run there: `python -m pytest tests/cuda`; elsewhere each test is skipped and says why.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conftest import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

FALLBACK = ROOT / "tests" / "backends" / "fallback.py"
# Layers of 96 outputs break, the others do not
CASES = "linear/w4-g32-sym/a16/bf16/m{1,2,7}-*/random-0"
# Whoever meets the error first says it in its words: torch or cuda-core
SAID = {
    "illegal_address": ("illegal memory access", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "misaligned_address": ("misaligned address", "CUDA_ERROR_MISALIGNED_ADDRESS"),
    "assert": ("assert",),
    "trap": ("unspecified launch failure", "CUDA_ERROR_LAUNCH_FAILED"),
    "endless": ("no answer within 6 seconds",),
    "out_of_memory": ("OutOfMemoryError",),
    "segmentation_fault": ("SIGSEGV",),
}


def test_a_broken_context_costs_the_case_that_broke_it(quantcts):
    backends = [w for c in SAID for w in ("--backend", f"conformance.backends.cuda_mutants:crash.{c}")]
    run = quantcts("run", *backends, "--cases", CASES, "--limit", "6", "-n", "4")
    assert run.code == 1
    assert not run.problems
    crashed = dict.fromkeys(SAID, 0)
    for record in run.report["cases"]:
        crash = record["backend"].rpartition(".")[2]
        breaks = "-n96-" in record["case"]
        assert record["outcome"] == ("crashes" if breaks else "conforms"), record
        if breaks:
            crashed[crash] += 1
            assert any(words in record["detail"] for words in SAID[crash]), record
    assert all(crashed.values()), crashed


def test_the_kernels_that_ran_are_in_the_report(quantcts):
    run = quantcts("run", "--backend", "cuda_kernels", "--cases", "linear/w4-g128-sym/a16/bf16/m1-n64-k128")
    assert run.code == 0
    names = run.report["kernels"]
    for record in run.report["cases"]:
        assert any(names[number].startswith("project_") for number in record["kernels"]), record


def test_a_fallback_is_dishonest(quantcts):
    run = quantcts(
        "run", "--backend", f"{FALLBACK}:handed_on", "--cases", "linear/w4-g128-sym/a16/bf16/m1-n64-k128"
    )
    assert run.code == 1
    assert set(run.outcomes.values()) == {"dishonest"}
    assert "launches no kernel of its own" in run.report["cases"][0]["detail"]
