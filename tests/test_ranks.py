"""Rank processes: what several ranks answer together, and what one bad rank costs."""

import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from conformance import ranks
from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.data.sharding import parallel_problem, shard
from conformance.goals.sharding import ParallelGoal
from conformance.ranks import Pool, answer_of, close, unavailable
from conformance.subject import Subject
from conformance.verdict import Outcome, decide
from reference.bounds import Contract

pytest.importorskip("torch")
FAULTY = ROOT / "tests" / "backends" / "parallel.py"
PARALLEL = [c for c in all_cases().values() if c.operation == "moe_parallel" and c.m]


def case_of(**wanted):
    return next(c for c in PARALLEL if all(getattr(c, field) == value for field, value in wanted.items()))


SMALL = case_of(ranks="tp2", experts=4)  # where the faulty backends fail
OTHER = case_of(ranks="ep2", experts=8, recipe="random")  # where they do not
TP4 = case_of(ranks="tp4", recipe="random")


@pytest.fixture
def pool():
    made = []

    def make(name, size=2, seconds=30.0):
        spec = name if name.isidentifier() else f"{FAULTY}:{name.removeprefix('/')}"
        made.append(Pool(spec, size, "gloo", seconds))
        return made[-1]

    yield make
    for each in made:
        each.kill()


@pytest.fixture
def pools():
    yield
    close()


def by_hand(case):
    """The sum in this process, rank after rank."""
    problem = parallel_problem(case).whole
    count = int(case.ranks[2:])
    total = 0
    for rank in range(count):
        layer = NumpyBackend().load_moe(shard(problem.checkpoint, case.ranks, rank))
        total = total + np.concatenate([layer(*call) for call in problem.calls]).astype(np.float64)
    return total


def test_ranks_answer_together(pool):
    four = pool("numpy", 4)
    for case in (SMALL, OTHER, TP4, case_of(ranks="ep4", experts=8)):
        count = int(case.ranks[2:])
        answer = four.ask(case, count)
        assert answer.arrays is not None, answer
        (total,) = answer.arrays
        assert total.dtype == np.float32
        assert np.allclose(total, by_hand(case), rtol=2.0**-22, atol=0)
        goal = ParallelGoal(parallel_problem(case), Contract(weights="rounded", intermediates="fp32"))
        assert goal.compare(answer.arrays).passes
    assert four.usable


def test_no_tokens(pool):
    case = next(
        c for c in all_cases().values() if c.operation == "moe_parallel" and not c.m and c.ranks[2:] == "2"
    )
    (total,) = pool("numpy").ask(case, 2).arrays
    assert total.shape == (0, case.k)


@pytest.mark.parametrize(
    ("name", "field", "text"),
    [
        ("Refuses", "refusal", "rank 1: NotImplementedError: shards of 4 bits are not supported"),
        ("Breaks", "crash", "rank 1: KeyError: 'no such key'"),
    ],
)
def test_a_rank_that_raises_costs_its_case_alone(pool, name, field, text):
    two = pool(f"/{name}")
    assert getattr(two.ask(SMALL, 2), field) == text
    assert two.usable
    assert two.ask(OTHER, 2).arrays is not None
    assert getattr(two.ask(SMALL, 2), field) == text


def test_an_answer_of_another_dtype_is_wrong(pool):
    answer = pool("/ReturnsFloat32OnRank1").ask(OTHER, 2)
    assert answer.wrong.startswith("rank 1: returned dtype float32, expected ")


def test_a_rank_that_hangs_is_given_up(pool):
    two = pool("/Hangs", seconds=3.0)
    assert two.ask(OTHER, 2).arrays is not None
    start = time.monotonic()
    assert two.ask(SMALL, 2).crash == "rank 1: no answer within 3 seconds"
    assert time.monotonic() - start < 6
    assert not two.usable
    processes = [rank.process for rank in two._ranks]
    two.kill()
    assert not any(process.is_alive() for process in processes)


def test_what_does_not_start_says_why(pool):
    two = pool("/NoSuchBackend")
    answer = two.ask(OTHER, 2)
    assert "it could not be started: RunError" in answer.crash
    assert "no attribute 'NoSuchBackend'" in answer.crash
    assert not two.usable


def test_a_dead_rank_is_replaced(pools):
    backend, spec = NumpyBackend(), f"{FAULTY}:Dies"
    assert answer_of(backend, spec, SMALL, 2).crash == "rank 1: its process ended with exit code 7"
    assert not ranks._pools
    assert answer_of(backend, spec, OTHER, 2).arrays is not None
    processes = [rank.process for made in ranks._pools.values() for rank in made._ranks]
    assert len(processes) == 4
    close()
    assert not any(process.is_alive() for process in processes)


def test_a_fault_on_one_rank_is_seen(pool):
    case = case_of(bias=True, ranks="tp2", recipe="random", experts=8)
    answer = pool("/NoBiasOnRank1").ask(case, 2)
    contract = Contract(weights="rounded", intermediates="fp32")
    subject = Subject(NumpyBackend(), case)
    verdict = decide(
        case, "no-bias", subject.support(), answer, lambda: ParallelGoal(parallel_problem(case), contract)
    )
    assert verdict.outcome is Outcome.DIVERGES


def test_a_fault_on_every_rank_is_named():
    from reference.moe import moe_semantics
    from reference.mutants import MUTANTS

    case = case_of(ranks="ep2", experts=8, recipe="random")
    problem, contract = parallel_problem(case), Contract(weights="rounded", intermediates="fp32")
    goal = ParallelGoal(problem, contract)
    mutant = MUTANTS["expert_map_ignored"]
    other = problem.mutated(moe_semantics(mutant.semantics), contract)
    only = next(iter(other.hypotheses.values()))
    answer = (other.finish(only, only.centre).astype(np.float32),)
    comparison = goal.compare(answer)
    assert not comparison.passes
    assert goal.diagnose(answer, comparison).fault == mutant.name


def test_without_torch_or_gpus_a_case_is_declined(monkeypatch):
    backend = NumpyBackend()
    assert unavailable(backend, 4) is None
    backend.device = "cuda"
    monkeypatch.setattr(ranks, "_cuda_devices", lambda: 2)
    assert unavailable(backend, 2) is None
    assert unavailable(backend, 4) == "4 ranks need as many GPUs; this machine has 2"
    backend.seen_gpus = 1  # said by the process that hosts it
    assert unavailable(backend, 2) == "2 ranks need as many GPUs; this machine has 1"
    backend.seen_gpus = 4
    assert unavailable(backend, 4) is None
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    subject = Subject(backend, TP4)
    assert "torch is not installed" in subject.support().reason
    assert subject.moe_parallel() is None
    verdict = decide(TP4, "numpy", subject.support(), None, lambda: None)
    assert verdict.outcome is Outcome.DECLINES


def test_the_suite_hands_the_spec_on(quantcts):
    run = quantcts("run", "--backend", f"{FAULTY}:Dies", "--cases", SMALL.id, "--cases", OTHER.id)
    assert run.outcomes == {SMALL.id: "crashes", OTHER.id: "conforms"}, run.output


def test_folders_of_ranks_are_removed(pool):
    one = pool("numpy")
    folder = Path(one._folder.name)
    assert folder.is_dir()
    one.kill()
    assert not folder.exists()
