"""What a backend breaks in its own process costs the case that broke it, and no other."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from conformance.backend import Support
from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.data import linear_problem
from conformance.direct import ask as ask_all
from conformance.errors import EnvironmentMissing, RunError
from conformance.goals import ArrayGoal
from conformance.isolation import remote
from conformance.isolation import supervisor as isolation_supervisor
from conformance.isolation.remote import RemoteBackend, RemoteSubject
from conformance.isolation.supervisor import Place, Supervisor
from conformance.order import in_turns, mixed, spread
from conformance.plugin import Plugin
from conformance.query import part, select
from conformance.roster import Roster
from conformance.sources import Computed
from conformance.subject import Answer, Subject
from conformance.verdict import LONGEST_KERNEL, Outcome, decide

BREAKING = ROOT / "tests" / "backends" / "breaking.py"
CASES = "linear/w{3,4}-g128-sym/a16/bf16/m1-n64-k128/{integers,random}-0"


def judged(quantcts, names, *options, env=None):
    backends = [word for name in names for word in ("--backend", f"{BREAKING}:{name}")]
    arguments = (*backends, "--isolate", "--limit", "3", "--cases", CASES)
    return quantcts("run", *arguments, *options, env=env)


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("-n", "2")])
def test_the_case_that_breaks_its_process_crashes_and_the_others_are_judged(quantcts, options):
    said = {
        "segfault": "its process was ended by SIGSEGV",
        "exits": "its process ended with exit code 7",
        "hangs": "no answer within 3 seconds",
        "out_of_memory": "MemoryError: cannot allocate 80 GiB",
    }
    run = judged(quantcts, said, *options)
    assert run.code == 1
    assert not run.problems
    records = run.report["cases"]
    assert len(records) == 4 * len(said)
    for record in records:
        crashes = "/w3-" in record["case"]
        assert record["outcome"] == ("crashes" if crashes else "conforms"), record
        assert not crashes or said[record["backend"]] in record["detail"]


def test_without_a_replacement_every_further_case_crashes_with_the_reason(quantcts, tmp_path):
    run = judged(quantcts, ["no_process"], env={"QUANTCTS_TEST_MARK": str(tmp_path / "mark")})
    assert run.code == 1
    details = [record.get("detail", "") for record in run.report["cases"]]
    assert any("its process ended with exit code 7" in detail for detail in details)
    assert any("ended with exit code 9 each of 3 times" in detail for detail in details)


def test_a_backend_that_cannot_be_loaded_ends_the_run_with_one_sentence(quantcts):
    run = judged(quantcts, ["dies_on_loading"])
    assert run.code == 4
    assert "its process ended with exit code 5 while it was loaded" in run.output


def test_what_a_backend_compiles_is_compiled_before_anything_is_judged(quantcts):
    run = judged(quantcts, ["prepares"])
    assert run.code == 0
    assert "compiled prepares: 4 kernels" in run.output


def test_without_the_preparation_the_same_backend_fails(quantcts):
    run = judged(quantcts, ["prepares"], "-k", "w4")
    assert set(run.outcomes.values()) == {"dishonest"}


def test_a_backend_that_does_not_say_what_it_supports_loses_those_cases_alone(quantcts):
    run = judged(quantcts, ["refuses_to_say"])
    for record in run.report["cases"]:
        said = "supports() raised KeyError: 'no entry for 3 bits'"
        if "/w3-" in record["case"]:
            assert record["outcome"] == "crashes"
            assert said in record["detail"]
        else:
            assert record["outcome"] == "conforms", record


def test_what_goes_wrong_in_a_preparation_is_said_and_left_to_the_cases(quantcts):
    run = judged(quantcts, ["fails_to_prepare"])
    assert run.code == 0
    assert "compiled fails_to_prepare: 1 kernels in" in run.output
    assert "and then: RuntimeError: the compiler is not there" in run.output


@pytest.mark.parametrize(
    ("options", "judges"), [pytest.param((), 1, marks=pytest.mark.slow), (("-n", "2"), 2)]
)
def test_a_report_says_what_its_judges_waited_for(quantcts, options, judges):
    words = ("--backend", "numpy", "--backend", "torch_cpu", "--isolate", "--cases", CASES)
    run = quantcts("run", *words, *options)
    assert run.code == 0, run.output
    spent = run.report["seconds"]["judging"]
    assert spent["judges"] == judges
    assert all(
        spent[f"{what} {name}"] > 0
        for what in ("answers of", "waiting for")
        for name in ("numpy", "torch_cpu")
    )
    assert "hosts that answered longest: " in run.output
    assert re.search(r"judged in \d+\.\d s\n", run.output)
    said = " ".join(run.output.partition(f"of the time of {judges} judges: ")[2].split())
    shares = re.findall(r"([a-z ]+) (\d+) %", said.partition("hosts that")[0])
    assert [name.strip() for name, _ in shares] == [
        "oracle and comparison", "transfers", "bundles", "waiting for a turn", "answers", "pytest and the rest"
    ]  # fmt: skip
    assert 97 <= sum(int(share) for _, share in shares) <= 103
    assert spent["transfers"] > 0


COMPILES_FOR_EVER = """
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from conformance.backends.numpy import NumpyBackend


class CompilesForEver(NumpyBackend):
    name = "compiles_for_ever"

    def prepare(self, cases, workers):
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            (Path(__file__).parent / "pid").write_text(f"{os.getpid()} {pool.submit(os.getpid).result()}")
            pool.submit(time.sleep, 600).result()
        yield "never"
"""


def test_what_compiles_ends_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "ever.py").write_text(COMPILES_FOR_EVER)
    end_with_a_killed_run(f"{tmp_path}/ever.py:CompilesForEver", tmp_path / "pid", count=2)


def end_with_a_killed_run(spec, place, count):
    """So many processes, whose pids the backend writes to a place."""
    words = ("run", "--backend", spec, "--isolate", "--cases", "packing/w4/*")
    run = subprocess.Popen([sys.executable, "-m", "quantcts", *words], cwd=ROOT)
    wait_until(lambda: place.exists() and len(place.read_text().split()) == count, 60)
    processes = [Path("/proc", pid) for pid in place.read_text().split()]
    assert all(process.exists() for process in processes)
    run.kill()
    run.wait()
    wait_until(lambda: not any(process.exists() for process in processes), 20)


STOPS = """
import os
import time
from pathlib import Path

from conformance.backends.numpy import NumpyBackend

MARK = Path(__file__).parent / "loaded"


class LoadsOnce(NumpyBackend):
    name = "loads_once"

    def __init__(self):
        if MARK.exists():
            time.sleep(600)
        MARK.touch()


class LoadsForEver(NumpyBackend):
    name = "loads_for_ever"

    def __init__(self):
        (MARK.parent / "pid").write_text(str(os.getpid()))
        time.sleep(600)


class OnAGpu(NumpyBackend):
    name, device = "on_a_gpu", "cuda"


class Silent(NumpyBackend):
    name = "silent"

    def prepare(self, cases, workers):
        yield "kernel"
        time.sleep(600)
"""
FOUR_BITS = "linear/w4-g128-sym/a16/bf16/m1-n64-k128/integers-0"


@pytest.fixture
def hosted():
    """Starts a host of a spec, in this process's care."""
    supervisor = Supervisor(profiled=False)

    def start(spec, aside=False):
        place = Place.from_json(supervisor.start([spec], gpus=0, aside=aside)[spec].to_json())
        return RemoteBackend(place, 0, limit=3.0), RemoteBackend(place, 0, limit=3.0)

    yield start
    supervisor.close()


def ask(backend, bits):
    case = all_cases()[FOUR_BITS.replace("w4", f"w{bits}")]
    problem = linear_problem(case)
    return backend.ask(case, "linear", (problem.checkpoint, problem.batches))[1]


def test_no_question_is_answered_for_by_what_others_asked(hosted, monkeypatch):
    innocent, other = hosted(f"{BREAKING}:exits")
    connect, deaths = innocent._connected, []

    def before_its_turn():
        connection = connect()
        if len(deaths) < 25:
            deaths.append(ask(other, 3).crash)
        return connection

    monkeypatch.setattr(innocent, "_connected", before_its_turn)
    assert ask(innocent, 4).crash is None
    assert deaths == ["its process ended with exit code 7"] * 25


def test_a_folder_whose_path_is_too_long_for_sockets_is_one_error(quantcts, monkeypatch, tmp_path):
    folder = tmp_path / ("a" * 60)
    folder.mkdir()
    run = judged(quantcts, ["exits"], env={"TMPDIR": str(folder)})
    assert run.code == 4
    said = "too long for the sockets of the backends' processes; let TMPDIR name"
    assert said in " ".join(run.output.split())
    monkeypatch.setattr("conformance.roster.has_driver", lambda: True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(EnvironmentMissing, match=said):
        Roster.of(["cuda_kernels"], False, 1.0, False)


def test_a_host_that_hangs_while_it_is_started_again_is_given_up(hosted, monkeypatch, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    backend, _ = hosted(f"{tmp_path}/stops.py:LoadsOnce")
    assert ask(backend, 4).crash is None
    monkeypatch.setattr(isolation_supervisor, "STARTING_SECONDS", 0.5)
    connection, pid = backend._begun(("ask", all_cases()[FOUR_BITS], None, (), 3.0))
    os.kill(pid, signal.SIGKILL)
    connection.close()
    backend._connection = None
    assert ask(backend, 4).crash == (
        "its process cannot be started: it was ended by SIGKILL each of 3 times that it was started, before it was "
        "asked anything: not loaded within 0 seconds"
    )


def test_what_loads_ends_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    end_with_a_killed_run(f"{tmp_path}/stops.py:LoadsForEver", tmp_path / "pid", count=1)


def test_a_gpu_that_does_not_answer_is_one_sentence(quantcts, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    words = ("--backend", f"{tmp_path}/stops.py:OnAGpu", "--cases", "packing/w4/*")
    run = quantcts("run", *words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.code == 4
    assert re.search(r"stops\.py:OnAGpu' could not be loaded: \w+: ", " ".join(run.output.split()))


def test_a_preparation_that_says_nothing_more_is_ended(hosted, monkeypatch, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    backend, _ = hosted(f"{tmp_path}/stops.py:Silent")
    monkeypatch.setattr(remote, "SILENT_SECONDS", 1.0)
    said = []
    assert (
        backend.prepare([all_cases()[FOUR_BITS]], 1, said.append)
        == "it said nothing for 1 seconds and was ended"
    )
    assert said == ["kernel"]
    assert ask(backend, 4).crash is None


def wait_until(holds, seconds):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--backend", f"{BREAKING}:exits", "--report", "."), 3, "it is a folder"),
        (("--backend", f"{BREAKING}:exits", "--backend", "tests/backends/breaking.py:exits"), 3, "two backends are"),
        (("--backend", f"{BREAKING}:misspelt"), 3, "has no attribute 'misspelt'"),
        (("--backend", f"{BREAKING}:exits", "--waivers", "none.toml"), 3, "none.toml"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_begin_ends_with_its_hosts(quantcts, options, code, words):
    run = quantcts("run", *options, "--isolate", "--cases", CASES)
    assert run.code == code
    assert words in run.output


@pytest.mark.parametrize("options", [("--isolate",), ()])
def test_no_backend_sees_that_it_is_tested(quantcts, options):
    run = quantcts("run", "--backend", f"{BREAKING}:looks_for_pytest", "--cases", CASES, *options)
    assert run.code == 0


def test_the_fallback_of_a_backend_is_no_kernel_of_its_own():
    """A layer that the library hands to plain torch, planted: its answer is right, its claim is not."""
    case = next(c for c in all_cases().values() if c.operation == "dequantize" and c.quick)
    right = np.ones((2, 2))

    def verdict(kernels, shape=(2, 2), beside=()):
        answer = Answer((np.ones(shape), *beside), kernels=kernels)
        goal = ArrayGoal(case, right[: shape[0]], lambda m: right, ())
        return decide(case, "planted", Support.yes(), answer, lambda: goal, "marlin|Marlin")

    assert verdict(("void cutlass::gemm", "vectorized_elementwise")).outcome is Outcome.DISHONEST
    assert verdict(()).outcome is Outcome.DISHONEST
    assert verdict(("cutlass::gemm", "marlin::Marlin<128>")).outcome is Outcome.CONFORMS
    assert verdict(None).outcome is Outcome.CONFORMS  # nobody looked
    assert verdict((), shape=(0, 2)).outcome is Outcome.CONFORMS  # nothing to launch
    static = verdict((), shape=(0, 2), beside=[np.ones((1, 1))])  # its scale needs no kernel
    assert static.outcome is Outcome.CONFORMS
    # Behind many template arguments
    deep = verdict(("f<" + "a" * 300 + "Marlin", "f<" + "a" * 300 + "other"))
    assert deep.outcome is Outcome.CONFORMS
    assert [len(name) for name in deep.kernels] == [LONGEST_KERNEL]


def test_kernels_are_recorded_of_the_calls_and_not_of_loading():
    made = []

    class Counts(NumpyBackend):
        def load_linear(self, checkpoint):
            layer = super().load_linear(checkpoint)
            made.append("load")
            return lambda x: made.append("call") or layer(x)

    case = next(c for c in all_cases().values() if c.operation == "linear" and c.quick)
    problem = linear_problem(case)
    subject = Subject(Counts(), case, keep=True)
    subject.linear(problem.checkpoint, problem.batches)
    assert made == ["load", *["call"] * len(problem.batches)]
    made.clear()
    subject.repeat()
    assert made == ["call"] * len(problem.batches)


@pytest.mark.parametrize(("some", "among"), [(0, 5), (1, 0), (3, 2), (1, 9), (3, 30), (7, 1000)])
def test_slow_cases_lie_evenly_among_the_others(some, among):
    slow, others = [f"slow{i}" for i in range(some)], [str(i) for i in range(among)]
    found = spread(slow, others)
    assert [f for f in found if f in slow] == slow
    assert [f for f in found if f not in slow] == others
    if among > 3 * some > 0:
        places = [found.index(s) for s in slow]
        steps = [b - a for a, b in zip([0, *places], [*places, among + some], strict=True)]
        assert max(steps) <= 2 * (among + some) / some


CONDUCT = "conduct/w{3-g32-asym,4-g128-sym}/a16/*/linear/*/strided-0"


def test_a_check_of_conduct_that_ends_its_process_leaves_the_one_that_others_ask(hosted):
    spec = f"{BREAKING}:exits"
    backend, _ = hosted(spec, aside=True)
    wait_until(backend.aside.present, 60)
    ended, conforms = (all_cases()[i] for i in sorted(select(all_cases(), [CONDUCT])))

    def pid(asked):
        connection, found = asked._begun(("ask", all_cases()[FOUR_BITS], None, (), 3.0))
        for _ in ("what it says", "its answer"):
            connection.recv()
        return found

    main, aside = pid(backend), pid(backend.aside)
    assert main != aside
    verdict = ask_all(RemoteSubject(backend, ended, spec), Computed()).verdict
    assert verdict.outcome is Outcome.CRASHES
    assert "its process ended with exit code 7" in verdict.detail
    verdict = ask_all(RemoteSubject(backend, conforms, spec), Computed()).verdict
    assert verdict.outcome is Outcome.CONFORMS
    assert pid(backend) == main
    assert pid(backend.aside) not in (main, aside)
    spent = Plugin.spent(SimpleNamespace(backends={"exits": backend}, bundling=0.0))
    assert spent["answers of exits (conduct)"] > spent["answers of exits"] == 0


def test_where_gpus_have_no_room_for_both_conduct_is_asked_like_all_else(hosted, monkeypatch):
    monkeypatch.setattr(isolation_supervisor, "ROOM", 1.5)
    backend, _ = hosted(f"{BREAKING}:exits", aside=True)
    assert backend.aside is backend


def test_a_second_process_that_is_not_there_is_not_waited_for(quantcts, tmp_path):
    """It loads once: another process of it would take ten minutes to load."""
    (tmp_path / "stops.py").write_text(STOPS)
    words = ("--backend", f"{tmp_path}/stops.py:LoadsOnce", "--isolate", "--cases", CONDUCT)
    run = quantcts("run", *words, "-n", "2")
    assert run.code == 0, run.output
    assert set(run.outcomes.values()) == {"conforms"}


def test_what_a_backend_compiles_serves_its_conduct_as_well(quantcts):
    run = quantcts("run", "--backend", f"{BREAKING}:prepares", "--isolate", "--cases", CONDUCT)
    assert run.code == 0, run.output


def test_cases_of_all_operations_are_asked_all_the_time():
    """One host is slow at packing: were its cases asked one after the other, all judges would wait for it."""
    operations = ["packing"] * 30 + ["linear"] * 300 + ["moe"] * 60
    items = [(operation, number, backend) for number, operation in enumerate(operations) for backend in "ab"]
    found = mixed(items, lambda item: item[1])
    assert sorted(found) == sorted(items)
    assert all(
        found[i][1] == found[i + 1][1] and found[i][2] < found[i + 1][2] for i in range(0, len(found), 2)
    )
    for tenth in range(10):
        part = [item[0] for item in found[tenth * 78 : tenth * 78 + 78]]
        assert 4 <= part.count("packing") <= 8, tenth
        assert 8 <= part.count("moe") <= 16, tenth
    assert mixed([], str) == []
    assert mixed([1], str) == [1]


def test_judges_do_not_all_begin_with_the_same_backend():
    found = in_turns([1, 2, 3, 4], ["a", "b", "c"])
    assert [case for case, _ in found] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert [backend for _, backend in found] == list("abcbcacababc")
    assert in_turns([1, 2], []) == []


def test_shards_are_equal_parts_and_make_the_whole():
    ids = list(all_cases())
    parts = [part(ids, f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(i for p in parts for i in p) == sorted(ids)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "1/0", "-1/2", "a/b"])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(RunError, match="give I/N"):
        part(["a"], shard)


def test_cuda_without_a_gpu_ends_with_the_reasons(quantcts):
    run = quantcts("run", "--backend", "cuda", "--quick", env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.code == 4
    assert "torch finds no CUDA device" in run.output


@pytest.mark.parametrize("no_bytecode", ["", "1"])
def test_the_doctor_says_what_is_there_and_why_the_rest_is_not(quantcts, no_bytecode):
    run = quantcts("doctor", env={"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": no_bytecode})
    assert run.code == 0
    assert ("each process compiles it anew" in run.output) == bool(no_bytecode)
    assert re.search(r"numpy +ready +cpu", run.output)
    assert re.search(r"compressed_tensors_cuda +absent +torch finds no CUDA", run.output)


@pytest.mark.parametrize("options", [("--isolate",), ()])
def test_a_contract_can_depend_on_the_case(quantcts, options):
    """Weights are rounded for 3 bits alone, and declared so."""
    run = quantcts("run", "--backend", f"{BREAKING}:rounds_3_bits", "--cases", CASES, *options)
    assert run.code == 0
    for record in run.report["cases"]:
        assert record.get("contract") == ({"weights": "rounded"} if "/w3-" in record["case"] else None)
