"""The conduct suite: each check sees the backend that misbehaves in its way, and no other check does."""

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace

import misbehaving
import numpy as np
import pytest
import torch
from conftest import ROOT

from conformance import diagnosis
from conformance.backends.compressed_tensors import CompressedTensorsBackend
from conformance.backends.numpy import NumpyBackend
from conformance.cases import CONDUCT, all_cases
from conformance.cases.conduct import called
from conformance.conduct import large
from conformance.conduct.canary import ask_guarded, watched
from conformance.conduct.checks import CHECKS
from conformance.conduct.guards import BAND, Guards, build, sentence
from conformance.conduct.needs import ON_CUDA
from conformance.conduct.observed import Question
from conformance.conduct.problems import ConductGoal, conduct_problems, goal_of, question_of
from conformance.direct import ask, judged
from conformance.query import offered, select
from conformance.sources import Computed
from conformance.subject import Subject
from conformance.verdict import Outcome

CASES = [c for c in all_cases().values() if c.operation == "conduct"]
HERE = [c for c in CASES if c.recipe not in ON_CUDA]
DENSE = "conduct/w4-g128-sym/a16/bf16/linear"
EXPERTS = "conduct/w4-channel-asym/a16/bf16/moe"

# backend -> the one check that sees it, the outcome, and words of the sentence
SEEN_BY = {
    "sums_in_another_order": ("repeat", "diverges", "of 5 equal calls differs in"),
    "scales_x_in_place": ("inputs", "diverges", "a call changed x: 16896 of 16896 elements, first at [0, 0]"),
    "repacks_in_place": ("inputs", "diverges", "loading changed weight_packed"),
    "keeps_one_output": ("outputs", "diverges", "a later call changed the answer to an earlier one"),
    "keeps_two_outputs_in_turn": ("outputs", "diverges", "a later call changed the answer to an earlier one"),
    "remembers_its_answers": ("outputs", "diverges", "after earlier answers were written over"),
    "returns_what_cannot_be_written": (
        "outputs",
        "diverges",
        "cannot be written over by its caller: ValueError",
    ),
    "takes_x_for_contiguous": ("strided", "diverges", "x as a slice of columns; "),
    "loads_whole_vectors_of_x": ("strided", "diverges", "x at an odd offset; "),
    "refuses_strides_in_silence": (
        "strided",
        "diverges",
        "it refuses a transposed x: ValueError without a message",
    ),
    "drops_a_column_of_a_row_alone": ("batch", "diverges", "each row alone; 66 of 16896 elements are wrong"),
    "repacks_into_one_workspace": ("alternating", "diverges", "the first of two layers called in turn; "),
    "refuses_no_rows": ("empty", "dishonest", "claims the case and refuses it: RuntimeError: invalid config"),
    "is_spoiled_by_no_rows": ("empty", "diverges", "after a call without rows; "),
}
# backend that conforms -> the check that notes what it does
NOTED_BY = {
    "sums_in_another_order_and_says_so": (
        "repeat",
        "declared nondeterministic (thread blocks add up as they finish): the second of 5",
    ),
    "refuses_strides": (
        "strided",
        "it refuses x at an odd offset: ValueError: x must be contiguous and aligned",
    ),
    "rounds_a_row_alone_in_another_way": (
        "batch",
        "not batch invariant: rows alone differ from a batch of 33 in",
    ),
}
SEEN_IN_EXPERTS = {
    "scales_router_weights_in_place": ("inputs", "a call changed the router weights"),
    "scales_x_in_place": ("inputs", "a call changed x"),
    "takes_ids_for_contiguous": ("strided", "router weights and ids as slices of columns; "),
    "repacks_into_one_workspace": ("alternating", "the first of two layers called in turn; "),
}


@pytest.fixture(autouse=True)
def undiagnosed(monkeypatch):
    """Which known fault a wrong answer is, is asked elsewhere, and takes seconds."""
    monkeypatch.setattr(diagnosis, "_SECONDS", -1.0)


def verdicts(name, cell):
    made = misbehaving.MISBEHAVING[name]
    return {c.recipe: judged(made(), c) for c in HERE if c.cell == cell}


def test_every_misbehaving_backend_is_tried():
    tried = {*SEEN_BY, *NOTED_BY, *SEEN_IN_EXPERTS}
    assert set(misbehaving.MISBEHAVING) == tried | {
        "behaves",
        "leaves_a_column_unwritten",
        "keeps_one_output_and_refuses_strides",
    }


@pytest.mark.parametrize("name", SEEN_BY)
def test_what_misbehaves_is_seen_by_its_check_and_by_no_other(name):
    check, outcome, words = SEEN_BY[name]
    found = verdicts(name, DENSE)
    assert set(found) == set(CONDUCT) - set(ON_CUDA)
    assert {c: str(v.outcome) for c, v in found.items()} == dict.fromkeys(found, "conforms") | {
        check: outcome
    }
    assert words in found[check].detail


@pytest.mark.parametrize("name", NOTED_BY)
def test_what_is_allowed_and_odd_is_noted_by_its_check_and_by_no_other(name):
    check, words = NOTED_BY[name]
    found = verdicts(name, DENSE)
    assert {v.outcome for v in found.values()} == {Outcome.CONFORMS}
    assert {c for c, v in found.items() if v.note} == {check}
    assert words in found[check].note


@pytest.mark.parametrize("name", SEEN_IN_EXPERTS)
def test_experts_that_misbehave_are_seen_by_their_check_and_by_no_other(name):
    check, words = SEEN_IN_EXPERTS[name]
    found = {
        c.recipe: judged(misbehaving.MISBEHAVING[name](), c)
        for c in HERE
        if c.cell == EXPERTS and c.recipe in ("inputs", "strided", "alternating")
    }
    assert {c for c, v in found.items() if v.outcome is Outcome.DIVERGES} == {check}
    assert words in found[check].detail


def test_what_is_never_written_shows_as_nan():
    case = next(c for c in HERE if c.cell == DENSE and c.recipe == "outputs")
    verdict = judged(misbehaving.leaves_a_column_unwritten(), case)
    assert verdict.outcome is Outcome.DIVERGES
    # Of one call or of both: where memory comes from is the allocator's affair.
    assert re.search("column 255; (33|66) NaN", verdict.detail), verdict.detail


def test_a_backend_that_behaves_conforms_and_says_what_was_seen():
    found = verdicts("behaves", DENSE)
    assert {v.outcome for v in found.values()} == {Outcome.CONFORMS}
    assert found["batch"].explained_by.endswith("; batch invariant")
    assert not any(v.note for v in found.values())


# Its layer of experts computes all earlier calls again: 68 of them take seconds.
@pytest.mark.parametrize(
    "case",
    [c for c in HERE if not c.experts or (c.quick and c.recipe != "batch")],
    ids=lambda c: c.id,
)
def test_numpy_conforms(case):
    verdict = judged(NumpyBackend(), case)
    assert verdict.outcome is Outcome.CONFORMS, verdict.detail


@pytest.mark.parametrize("case", [c for c in HERE if c.quick], ids=lambda c: c.id)
def test_compressed_tensors_conforms(case):
    verdict = judged(CompressedTensorsBackend(), case)
    assert verdict.outcome is Outcome.CONFORMS, verdict.detail
    assert verdict.elements > 0


@pytest.mark.parametrize("recipe", ["repeat", "alternating", "batch"])
def test_the_calls_of_a_check_can_be_made_once_more(recipe):
    """For the kernels that they launch; of the whole check that would be more than its layer's."""
    case = next(c for c in CASES if c.recipe == recipe and not c.experts)
    subject = Subject(NumpyBackend(), case, keep=True)
    assert ask(subject, Computed()).verdict.outcome is Outcome.CONFORMS
    (question, *_) = [question_of(problem) for problem in conduct_problems(case)]
    again = subject.repeat()
    assert {y.shape[1] for y in again} == {int(question.checkpoint.tensors["weight_shape"][0])}


@pytest.mark.parametrize("case", [c for c in CASES if c.recipe in ON_CUDA][::7], ids=lambda c: c.id)
def test_what_needs_cuda_is_declined_with_the_reason(case):
    verdict = judged(NumpyBackend(), case)
    assert verdict.outcome is Outcome.DECLINES
    assert verdict.detail == "it is asked of backends on CUDA devices; this one is on cpu"


def test_a_backend_is_asked_about_the_plain_layer():
    class Asked(NumpyBackend):
        def supports(self, case):
            assert case.operation in ("linear", "moe")
            return super().supports(case)

    for case in (c for c in HERE if c.quick and c.recipe in ("inputs", "empty")):
        assert judged(Asked(), case).outcome is Outcome.CONFORMS


def test_a_format_that_is_declined_is_declined_by_the_refusal_of_its_layer():
    from conformance.backend import Support

    class Declines(NumpyBackend):
        def supports(self, case):
            return Support.no("no symmetric weights")

        def load_linear(self, checkpoint):
            raise NotImplementedError("no symmetric weights")

    for case in (c for c in HERE if c.cell == DENSE):
        verdict = judged(Declines(), case)
        assert verdict.outcome is Outcome.DECLINES
        assert "when called: NotImplementedError: no symmetric weights" in verdict.detail


def test_every_check_is_done_dense_and_with_experts_and_quickly():
    assert set(CHECKS) == set(CONDUCT)
    for check in set(CONDUCT) - {"overflow"}:
        for chosen in (CASES, [c for c in CASES if c.quick]):
            assert {bool(c.experts) for c in chosen if c.recipe == check} == {True, False}, check
    assert {c.dtype for c in CASES} == {"bf16", "fp16"}
    assert {c.activation.kind for c in CASES} == {"a16", "int8", "fp8"}


def test_what_is_compiled_beforehand_is_every_number_of_rows_that_is_called():
    rows = {c.recipe: [plain.m for plain in called(c)] for c in CASES if c.cell == DENSE}
    assert rows["batch"] == [33, 1]
    assert rows["empty"] == [0, 33]
    assert rows["strided"] == [33]
    assert {plain.operation for c in CASES for plain in called(c)} == {"linear", "moe"}


def test_an_answer_of_inference_mode_is_its_callers_all_the_same():
    class Inference(CompressedTensorsBackend):
        def load_linear(self, checkpoint):
            return torch.inference_mode()(super().load_linear(checkpoint))

    case = next(c for c in HERE if c.cell == DENSE and c.recipe == "outputs")
    assert judged(Inference(), case).outcome is Outcome.CONFORMS


def test_what_takes_a_whole_gpu_is_offered_only_to_a_query_that_names_it():
    large_ones = [c.id for c in CASES if c.on_request]
    assert large_ones
    cases = all_cases()
    for queries in ([], ["conduct/*"], ["!conduct/*"], ["!*/overflow-*"]):
        assert not set(large_ones) & set(offered(cases, False, queries))
    for query in ("conduct/*/overflow-0", large_ones[0]):
        assert set(select(offered(cases, True, [query]), [query])) <= set(large_ones)


def test_misbehaviour_is_reported_from_a_process_of_its_own(quantcts):
    backend = ROOT / "tests" / "backends" / "misbehaving.py"
    query = f"{DENSE}/*/{{outputs,strided,batch,stream}}-0"
    name = "keeps_one_output_and_refuses_strides"
    run = quantcts("run", "--backend", f"{backend}:{name}", "--isolate", "--cases", query)
    assert run.code == 1
    assert not run.problems
    found = {r["case"].rpartition("/")[2]: r for r in run.report["cases"]}
    assert {check: r["outcome"] for check, r in found.items()} == {
        "outputs-0": "diverges",
        "strided-0": "conforms",
        "batch-0": "conforms",
        "stream-0": "declines",
    }
    assert "a later call changed the answer to an earlier one" in found["outputs-0"]["detail"]
    assert "it refuses a transposed x" in found["strided-0"]["note"]
    assert "batch invariant" in found["batch-0"]["explained_by"]


# ---- more than 2^31 elements, on a smaller scale


class Wraps(NumpyBackend):
    """Rows and columns from these on are those from the start."""

    rows = columns = 10**9

    def load_linear(self, checkpoint):
        layer = super().load_linear(checkpoint)

        def linear(x):
            y = layer(x)
            y[self.rows :] = y[: max(0, len(y) - self.rows)]
            y[:, self.columns :] = y[:, : max(0, y.shape[1] - self.columns)]
            return y

        return linear


def compared_beyond(monkeypatch, backend, m, n):
    """What is made of a large layer's outputs where the boundary is 2^16; the number of windows."""
    monkeypatch.setattr(large, "BOUNDARY", 2**16)
    case = replace(next(c for c in CASES if c.recipe == "overflow"), m=m, n=n, k=128)
    (problem,) = conduct_problems(case)
    seen = large.overflow(Subject(backend, case), [question_of(problem)])
    goal = ConductGoal([goal_of(problem, backend.contract)], seen)
    return goal.compare(tuple(output.array for output in seen.outputs)), len(seen.outputs)


@pytest.mark.parametrize(("m", "n", "windows"), [(1, 1000, 3), (300, 250, 6), (600, 64, 3)])
@pytest.mark.parametrize("backend", [NumpyBackend(), CompressedTensorsBackend()], ids=lambda b: b.name)
def test_outputs_beyond_the_boundary_are_those_of_a_small_layer(monkeypatch, backend, m, n, windows):
    comparison, count = compared_beyond(monkeypatch, backend, m, n)
    assert comparison.passes
    assert count == windows


@pytest.mark.parametrize(
    ("m", "n", "where", "window"),
    [
        (1, 1000, {"columns": 512}, "rows from 0 and columns from 416 of [1, 1000]; 97 of 386"),
        (300, 250, {"rows": 256}, "rows from 246 and columns from 0 of [300, 250]; "),
    ],
)
def test_an_offset_that_wraps_around_is_seen_where_it_does(monkeypatch, m, n, where, window):
    backend = Wraps()
    vars(backend).update(where)
    comparison, _ = compared_beyond(monkeypatch, backend, m, n)
    assert not comparison.passes
    assert comparison.detail.startswith(window.partition(";")[0])


# ---- the guarding allocator, over a CUDA runtime made of malloc

FAKE = """
#include <cstdlib>
#include <cstring>
static int failed = 0;
extern "C" {
int cudaMalloc(void **p, size_t n) { *p = malloc(n); return failed; }
int cudaFree(void *p) { free(p); return failed; }
int cudaMemset(void *p, int value, size_t n) { memset(p, value, n); return failed; }
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { memcpy(to, from, n); return kind == 2 ? failed : 1; }
int cudaDeviceSynchronize() { return failed; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int) { return 0; }
void fail(int error) { failed = error; }
}
"""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guards")
    (folder / "fake.cpp").write_text(FAKE)
    fake = folder / "libcudart-fake.so"
    subprocess.run(["g++", "-shared", "-fPIC", folder / "fake.cpp", "-o", fake], check=True)
    return build(folder), ctypes.CDLL(str(fake)), fake


@pytest.fixture
def guards(built, tmp_path):
    path, _, fake = built
    own = shutil.copy(path, tmp_path / "guards.so")  # a library of its own has a state of its own
    return Guards.of(own, str(fake))


def allocated(guards, size):
    address = guards.library.guards_alloc(size, 0, None)
    return address, np.ctypeslib.as_array((ctypes.c_ubyte * (size + 2 * BAND)).from_address(address - BAND))


@needs_compiler
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 100_000])
def test_guarded_memory_is_nan_and_may_be_written_to_its_last_byte(guards, size):
    address, memory = allocated(guards, size)
    assert (memory == 0xFF).all()
    assert np.isnan(memory[BAND : BAND + size // 2 * 2].view(np.float16)).all()
    memory[BAND : BAND + size] = 0
    assert guards.damages() == []
    guards.library.guards_free(address, size, 0, None)
    assert guards.damages() == []
    assert guards.allocations == 1


@needs_compiler
@pytest.mark.parametrize(
    ("start", "bytes_", "side", "nearest"),
    [
        (BAND + 64, 1, 1, 0),
        (BAND + 64 + 12, 4, 1, 12),
        (2 * BAND + 63, 1, 1, BAND - 1),
        (BAND + 64, BAND, 1, 0),
        (BAND - 1, 1, 0, 0),
        (BAND - 20, 16, 0, 4),
        (0, 1, 0, BAND - 1),
    ],
)
@pytest.mark.parametrize("freed", [False, True])
def test_every_byte_outside_is_seen_once(guards, start, bytes_, side, nearest, freed):
    others = [allocated(guards, 64)[0] for _ in range(3)]
    address, memory = allocated(guards, 64)
    memory[start : start + bytes_] = 0
    if freed:
        guards.library.guards_free(address, 64, 0, None)
    for _ in range(2):
        (damage,) = guards.damages()
        found = (damage.number, damage.size, damage.side, damage.bytes, damage.nearest)
        assert found == (4, 64, side, bytes_, nearest)
    assert guards.number(address) == (0 if freed else 4)
    assert [guards.number(other + 63) for other in others] == [1, 2, 3]
    assert guards.number(others[0] + 64) == 0


@needs_compiler
def test_a_band_that_cannot_be_read_is_counted(guards, built):
    _, fake, _ = built
    address, _ = allocated(guards, 64)
    fake.fail(700)
    try:
        guards.library.guards_free(address, 64, 0, None)
    finally:
        fake.fail(0)
    assert (guards.damages(), guards.unread) == ([], 2)


@needs_compiler
def test_another_runtime_is_refused(built, tmp_path):
    path, _, _ = built
    with pytest.raises(RuntimeError, match=r"missing\.so is not loaded"):
        Guards.of(path, str(tmp_path / "missing.so"))


@needs_compiler
def test_what_a_kernel_writes_beyond_its_workspace_is_said_in_words(guards):
    """A last tile of 64 rows that is stored whole, planted beside a right answer."""
    case = next(c for c in CASES if c.recipe == "canary" and c.cell == DENSE)
    (problem,) = conduct_problems(case)

    class Overruns(CompressedTensorsBackend):
        beyond = 0

        def load_linear(self, checkpoint):
            layer = super().load_linear(checkpoint)
            workspace, _ = allocated(guards, 33 * 64)

            def linear(x):
                ctypes.memset(workspace, 0, 33 * 64 + self.beyond)
                return layer(x)

            return linear

    backend = Overruns()
    seen = watched(guards, Subject(backend, case), [question_of(problem)])
    assert not seen.faults
    assert seen.seen == "the bands of 1 allocations are whole"
    backend.beyond = 31 * 64
    seen = watched(guards, Subject(backend, case), [question_of(problem)])
    assert seen.faults == (
        "it wrote 1984 bytes behind an allocation of the backend's (2112 bytes), the nearest 0 bytes away",
    )


@needs_compiler
def test_an_allocator_that_is_not_in_force_says_nothing_good(guards):
    case = next(c for c in CASES if c.recipe == "canary" and c.cell == DENSE)
    (problem,) = conduct_problems(case)
    with pytest.raises(OSError, match="not in force"):
        watched(guards, Subject(CompressedTensorsBackend(), case), [question_of(problem)])


@needs_compiler
def test_names_of_allocations_are_said(guards):
    address, memory = allocated(guards, 64)
    memory[BAND + 64 :] = 0
    (damage,) = guards.damages()
    said = sentence(damage, {guards.number(address): "the answer to call 1"})
    assert (
        said
        == "it wrote at least 4096 bytes behind the answer to call 1 (64 bytes), the nearest 0 bytes away"
    )


@needs_compiler
def test_the_guarded_process_answers_in_words_where_there_is_no_cuda():
    case = next(c for c in CASES if c.recipe == "canary" and c.cell == DENSE)
    (problem,) = conduct_problems(case)
    question = question_of(problem)
    assert isinstance(question, Question)
    answer = ask_guarded("numpy", case, [question])
    assert answer.crash is not None
    assert "this process has loaded no CUDA runtime library (libcudart)" in answer.crash
    assert "does not answer within 0 seconds" in str(ask_guarded("numpy", case, [question], limit=0.01).crash)
