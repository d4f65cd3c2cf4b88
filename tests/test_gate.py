"""The merge gate: each kind of regression is seen, seeded by a wrong backend or a slowed file; noise is not."""

import copy
import datetime
import json
import os
import subprocess
import sys

import pytest
from conftest import FAULTY, ROOT

from conformance.cases import all_cases
from conformance.cli import main
from conformance.errors import RunError
from conformance.exitcodes import ExitCode, worst
from conformance.gate.changes import Change, Kind
from conformance.gate.decision import decide
from conformance.gate.shown import markdown_of, text_of
from conformance.gate.timings import compare_timings, read_timings
from conformance.query import offered, select
from conformance.waivers import read_waivers

QUERIES = ("linear/w4-g32-asym/a16/bf16", "packing/w4", "conduct/w3-g32-asym/a16/bf16/linear/*/repeat-0")
KERNEL = """
import sys
sys.path.insert(0, {folder!r})
import faulty, misbehaving
from conformance.backend import Support

class declining(faulty.no_fault):
    def supports(self, case):
        asymmetric = case.operation == "linear" and not case.weight.symmetric
        return Support.no("asymmetric weights") if asymmetric else Support.yes()

    def load_linear(self, checkpoint):
        if not checkpoint.weights["symmetric"]:
            raise NotImplementedError("asymmetric weights")
        return super().load_linear(checkpoint)

class backend({base}):
    name = "kernel"
"""


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Judge a backend of the name `kernel`, right or wrong in one way; answers with the report's path."""
    folder = tmp_path_factory.mktemp("gate")
    made = {}

    def judge(base, *options):
        key = (base, *options)
        if key not in made:
            source = folder / f"kernel{len(made)}.py"
            source.write_text(KERNEL.format(folder=str(FAULTY.parent), base=base))
            report = folder / f"{len(made)}.json"
            made[key] = report, _run(source, report, *options)
        return made[key]

    return judge


def _run(source, report, *options):
    cases = [word for query in QUERIES for word in ("--cases", query)]
    command = [sys.executable, "-m", "quantcts", "run", "--backend", f"{source}:backend", *cases]
    size = [] if "--full" in options else ["--quick"]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *size, "--report", str(report), *map(str, options)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def baseline(judged):
    path, done = judged("misbehaving.behaves")
    assert done.returncode == 0, done.stdout
    return path


@pytest.fixture
def document(baseline):
    return json.loads(baseline.read_text())


def gate(capsys, *arguments):
    """Exit code and output of `quantcts gate`."""
    with pytest.raises(SystemExit) as ended:
        main(["gate", *map(str, arguments)])
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err


def written(path, document):
    path.write_text(json.dumps(document))
    return path


def kinds(decision):
    return {change.kind for change in decision.changes}


# ---- conformance


def test_the_same_twice_passes(baseline, judged, capsys):
    again, _ = judged("misbehaving.behaves", "--full")
    assert gate(capsys, "--baseline", baseline, "--current", baseline)[0] == 0
    code, said = gate(capsys, "--baseline", baseline, "--current", again)
    assert code == 0
    assert "new case: " in said


@pytest.mark.parametrize(
    ("base", "kind", "case"),
    [
        ("faulty.zero_point_plus_one", Kind.FAILS, "linear/w4-g32-asym/a16/bf16/"),
        ("faulty.floor_words", Kind.FAILS, "packing/w4/"),
        ("declining", Kind.DECLINES, "linear/w4-g32-asym/a16/bf16/"),
        ("misbehaving.sums_in_another_order", Kind.NONDETERMINISTIC, "conduct/w3-g32-asym/"),
        ("misbehaving.sums_in_another_order_and_says_so", Kind.NONDETERMINISTIC, "conduct/w3-g32-asym/"),
    ],
)
def test_each_regression_is_listed_with_case_and_backend_and_its_repair_as_better(
    judged, baseline, capsys, base, kind, case
):
    worse, _ = judged(base)
    code, said = gate(capsys, "--baseline", baseline, "--current", worse)
    assert code == 1, said
    own = said.partition(f"{kind.value}: ")[2].splitlines()
    assert any(line.startswith(f"  kernel {case}") for line in own), said
    code, said = gate(capsys, "--baseline", worse, "--current", baseline)
    assert code == 0, said
    assert " 0 worse, 0 better" not in said


def test_a_case_that_vanished_fails(document):
    now = copy.deepcopy(document)
    gone = now["cases"].pop()
    found = decide(document, now)
    assert found.exit_code == 1
    assert Change(Kind.VANISHED, "kernel", gone["case"], "conforms") in found.changes


def test_a_backend_that_is_absent_now_takes_its_cases_with_it(document):
    both = copy.deepcopy(document)
    both["environment"]["backends"].append({**both["environment"]["backends"][0], "name": "other"})
    both["cases"] += [{**record, "backend": "other"} for record in document["cases"]]
    now = copy.deepcopy(document)
    now["environment"]["absent"] = {"other": "it does not import"}
    found = decide(both, now)
    assert found.exit_code == 1
    vanished = [c for c in found.changes if c.kind is Kind.VANISHED]
    assert len(vanished) == len(document["cases"])
    assert "it does not import" in vanished[0].detail
    with pytest.raises(RunError, match=r"other, which was not asked now.*--subset"):
        decide(both, document)
    assert decide(both, document, subset=True).exit_code == 0


def test_a_new_case_is_no_regression_even_where_it_fails(document):
    older = copy.deepcopy(document)
    new = older["cases"].pop()
    now = copy.deepcopy(document)
    now["cases"][-1]["outcome"] = "crashes"
    assert kinds(decide(older, document)) == {Kind.NEW}
    found = decide(older, now)
    assert [(c.kind, c.case) for c in found.changes] == [(Kind.NEW_FAILING, new["case"])]
    assert found.exit_code == 0


def test_what_fails_as_before_is_told_and_another_fault_is_told_apart(judged):
    first, second = (
        json.loads(judged(f"faulty.{n}")[0].read_text()) for n in ("zero_point_plus_one", "floor_words")
    )
    assert kinds(decide(first, first)) == {Kind.STILL}
    other = copy.deepcopy(first)
    for record in other["cases"]:
        if record["outcome"] == "diverges":
            record["outcome"] = "crashes"
    assert kinds(decide(first, other)) == {Kind.OTHERWISE}
    assert {Kind.FAILS, Kind.FIXED} <= kinds(decide(first, second))


def test_a_wrong_account_closes_the_gate_and_makes_no_baseline(document):
    broken = copy.deepcopy(document)
    broken["ledger"]["problems"] = ["x: planned but never judged"]
    assert kinds(decide(document, broken)) == {Kind.ACCOUNT}
    with pytest.raises(RunError, match="broken run"):
        decide(broken, document)


def test_a_promise_that_became_weaker_is_told(document):
    now = copy.deepcopy(document)
    now["environment"]["backends"][0]["contract"]["partial_sums"] = 8
    assert decide(document, now).notes == ["kernel: promise partial_sums: 1 before, 8 now"]


def test_a_backend_that_begins_to_call_itself_nondeterministic_is_worse(document):
    now = copy.deepcopy(document)
    now["environment"]["backends"][0]["nondeterministic"] = "atomics"
    found = decide(document, now)
    assert [(c.kind, c.backend) for c in found.changes] == [(Kind.NONDETERMINISTIC, "kernel")]
    assert found.exit_code == 1
    assert kinds(decide(now, document)) == {Kind.DETERMINISTIC}


# ---- what cannot be compared


def other_schema(document):
    document["schema"] = "quantcts-report/1"


def other_gpu(document):
    document["environment"]["backends"][0]["device"] = "cuda"
    document["environment"]["gpus"] = ["NVIDIA L4, sm_89, driver 570.1"]


def other_processor(document):
    document["environment"]["processor"] = "aarch64"


def narrower(document):
    document["selection"]["queries"] = ["packing/w4"]


def by_keyword(document):
    document["selection"]["keyword"] = "w4"


def of_vectors(document):
    document["selection"]["vectors"] = {"version": "1.0.0", "sha256": "0" * 64, "without_expectation": {}}


def of_a_checkpoint(document):
    document["selection"]["set"] = "checkpoint"


def of_nothing(document):
    for record in document["cases"]:
        record["outcome"] = "declines"
    count = len(document["cases"])
    document["ledger"] |= {"judged": 0, "conforms": 0, "declines": count, "planned": count}
    document["exit_code"] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_schema, "schema"),
        (other_gpu, "another device"),
        (other_processor, "another device"),
        (narrower, "another selection"),
        (by_keyword, "another selection"),
        (of_vectors, "other vectors"),
        (of_a_checkpoint, "checkpoint"),
        (of_nothing, "nothing to compare"),
    ],
)
def test_incomparable_reports_are_named(baseline, document, tmp_path, capsys, change, words):
    change(document)
    code, said = gate(capsys, "--baseline", baseline, "--current", written(tmp_path / "now.json", document))
    assert code == 3
    assert said.count("\n") == 1
    assert words in said


def test_other_backends_have_nothing_in_common(document):
    other = copy.deepcopy(document)
    other["environment"]["backends"][0]["name"] = "other"
    for record in other["cases"]:
        record["backend"] = "other"
    with pytest.raises(RunError, match="kernel, which was not asked now"):
        decide(document, other)
    with pytest.raises(RunError, match="in common"):
        decide(document, other, subset=True)


def test_a_part_of_the_selection_is_compared_only_on_purpose(document):
    now = copy.deepcopy(document)
    narrower(now)
    now["cases"] = [r for r in now["cases"] if r["case"].startswith("packing/")]
    with pytest.raises(RunError, match=r"leaves out .* cases such as conduct/"):
        decide(document, now)
    assert decide(document, now, subset=True).exit_code == 0
    now["cases"].pop()
    assert kinds(decide(document, now, subset=True)) == {Kind.VANISHED}


def test_more_than_the_baseline_selected_is_harmless(document):
    now = copy.deepcopy(document)
    now["selection"]["set"] = "full"
    assert decide(document, now).exit_code == 0


def test_another_version_of_the_specification_is_told(document):
    before = copy.deepcopy(document)
    before["environment"]["specification"] = "0.9"
    said = "version of the specification: 0.9 before, 1.0 now"
    assert said in decide(before, document).notes


def test_some_shards_of_a_merged_run_are_compared_on_purpose(baseline, document):
    part = copy.deepcopy(document)
    part["selection"]["shard"] = "1,2/3"
    every = list(document["selection"]["queries"])
    chosen = select(offered(all_cases(), True, every), every)
    held = {case for i in (1, 2) for case in chosen[i - 1 :: 3]}
    part["cases"] = [c for c in part["cases"] if c["case"] in held]
    with pytest.raises(RunError, match="which leaves out"):
        decide(document, part)
    decision = decide(document, part, subset=True)
    assert decision.exit_code == 0
    assert decision.verdicts == len(part["cases"]) == len(held)


def test_versions_are_told_and_harmless(document):
    now = copy.deepcopy(document)
    now["environment"]["packages"]["numpy"] = "9.9"
    found = decide(document, now)
    assert found.exit_code == 0
    assert len(found.notes) == 1
    assert "9.9 now" in found.notes[0]


def test_a_case_that_another_version_of_the_suite_dropped_did_not_vanish(document):
    older = copy.deepcopy(document)
    older["cases"].append({**older["cases"][0], "case": "packing/w4/dim0/n7-k31/once-0"})
    assert kinds(decide(older, document)) == {Kind.VANISHED}
    older["environment"]["packages"]["quantcts"] = "0.0.9"
    found = decide(older, document)
    assert found.exit_code == 0
    assert any("no longer has" in note for note in found.notes)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "quantcts-report/3"}'])
def test_a_malformed_baseline_is_a_usage_error(baseline, tmp_path, capsys, content):
    path = tmp_path / "base.json"
    path.write_text(content)
    code, said = gate(capsys, "--baseline", path, "--current", baseline)
    assert code == 3
    assert str(path) in said
    assert said.count("\n") == 1


# ---- waivers


def waiver(path, query, expires=datetime.date(2099, 1, 1)):
    path.write_text(
        f'[[waiver]]\nbackend = "kernel"\nquery = "{query}"\nreason = "known"\n'
        f'link = "https://example.org/1"\nexpires = {expires}\n'
    )
    return path


def test_a_waived_failure_does_not_close_the_gate(judged, baseline, tmp_path, capsys):
    worse, _ = judged("faulty.floor_words")
    failing = [r["case"] for r in json.loads(worse.read_text())["cases"] if r["outcome"] == "diverges"]
    assert all(case.startswith("packing/") for case in failing)
    base = ("--baseline", baseline, "--current", worse, "--waivers")
    code, said = gate(capsys, *base, waiver(tmp_path / "w.toml", "packing/w4/*"))
    assert code == 0
    assert f"newly waived: {len(failing)}" in said
    code, said = gate(capsys, *base, waiver(tmp_path / "w.toml", failing[0]))
    assert (code, f"newly failing: {len(failing) - 1}" in said) == (1, True)


def test_a_waiver_that_has_outlived_its_fault_closes_the_gate(baseline, tmp_path, capsys):
    base = ("--baseline", baseline, "--current", baseline, "--waivers")
    code, said = gate(capsys, *base, waiver(tmp_path / "w.toml", "packing/w4/*"))
    assert code == 1
    assert "waived, and fails no more" in said
    for query, expires in (
        ("packing/w99/*", datetime.date(2099, 1, 1)),
        ("packing/w4/*", datetime.date(2020, 1, 1)),
    ):
        code, said = gate(capsys, *base, waiver(tmp_path / "w.toml", query, expires))
        assert code == 3, said


def test_a_waiver_that_the_run_itself_found_outlived_closes_the_gate_as_well(
    judged, baseline, tmp_path, capsys
):
    """The verdict stays right, the account has the problem, and no waiver waives it."""
    path = waiver(tmp_path / "w.toml", "packing/w4/*")
    report, done = judged("faulty.no_fault", "--waivers", path)
    assert done.returncode == 1, done.stdout
    document = json.loads(report.read_text())
    assert {record["outcome"] for record in document["cases"]} <= {"conforms", "declines"}
    assert any("although the waiver" in problem for problem in document["ledger"]["problems"])
    for words in ((), ("--waivers", path)):
        code, said = gate(capsys, "--baseline", baseline, "--current", report, *words)
        assert code == 1, said


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            [{"query": "linear/*"}, {"query": "linear/w4-*"}],
            "waiver 2: those before it waive all that it matches",
        ),
        (
            [{"query": "linear/*", "backend": "*"}, {"query": "linear/w4-*", "backend": "k*"}],
            "waiver 2: those before",
        ),
        ([{"query": "linear/*"}, {"query": "linear/w4-*", "backend": "k*"}], ""),
        ([{"query": "linear/*"}, {"query": "*"}], ""),
        ([{"query": "linear/*", "reason": "  "}], "waiver 1: reason: missing"),
        ([{"query": "linear/*", "reason": "known [crashes: see]"}], "waiver 1: reason: leave out"),
    ],
)
def test_each_waiver_waives_something_for_a_reason(tmp_path, tables, said):
    usual = {"backend": "kernel", "reason": "a fault", "link": "https://example.org/1"}
    lines = []
    for table in tables:
        lines += [
            "[[waiver]]",
            "expires = 2099-01-01",
            *(f'{k} = "{v}"' for k, v in {**usual, **table}.items()),
        ]
    path = tmp_path / "waivers.toml"
    path.write_text("\n".join(lines))
    if not said:
        assert len(read_waivers(path, all_cases(), ["kernel"])) == len(tables)
        return
    with pytest.raises(RunError, match=said):
        read_waivers(path, all_cases(), ["kernel"])


def test_a_waiver_of_no_backend_is_an_error(baseline, tmp_path, capsys):
    path = waiver(tmp_path / "w.toml", "packing/w4/*")
    path.write_text(path.read_text().replace('"kernel"', '"kernle"'))
    code, said = gate(capsys, "--baseline", baseline, "--current", baseline, "--waivers", path)
    assert code == 3
    assert "backend: 'kernle' matches none of" in said


def test_what_the_run_waived_stays_waived(judged, baseline, tmp_path):
    path = waiver(tmp_path / "w.toml", "packing/w4/*")
    report, done = judged("faulty.floor_words", "--waivers", path)
    assert done.returncode == 0, done.stdout
    known = read_waivers(path, all_cases(), ["kernel"])
    found = decide(json.loads(baseline.read_text()), json.loads(report.read_text()), known)
    assert found.exit_code == 0
    assert kinds(found) == {Kind.WAIVED}


# ---- times


def bench(path, medians, **extra):
    """A file as pytest-benchmark writes it. medians: case -> seconds, or the reason why it is none."""
    records = []
    for case, median in medians.items():
        own = {"case": case, "backend": "kernel", **extra}
        if isinstance(median, str):
            own["invalid"], median = median, 1e-6
        stats = {"median": median, "iqr": 0.01 * median, "rounds": 100}
        records.append({"fullname": f"bench.py::{case}", "extra_info": own, "stats": stats})
    return written(path, {"machine_info": {"cpu": {"brand_raw": "a CPU"}}, "benchmarks": records})


TIMES = {"linear/w4/m1": 20e-6, "linear/w4/m16": 25e-6, "moe/w4/t1": 100e-6}


@pytest.fixture
def timed(baseline, tmp_path, capsys):
    """The gate on TIMES and other medians."""

    def call(medians, *options, before=TIMES, extra=None, extra_before=None):
        old = bench(tmp_path / "old.bench.json", before, **(extra_before or extra or {}))
        new = bench(tmp_path / "new.bench.json", medians, **(extra or {}))
        reports = ("--baseline", baseline, "--current", baseline)
        return gate(capsys, *reports, "--baseline-bench", old, "--current-bench", new, *options)

    return call


def test_a_slowed_backend_fails_with_2_and_is_named(timed):
    slowed = {**TIMES, "linear/w4/m16": 1.3 * TIMES["linear/w4/m16"]}
    code, said = timed(slowed)
    assert code == 2
    assert "newly slow: 1\n  kernel linear/w4/m16 (25 µs -> 32.5 µs): 1.30 times as long" in said
    assert timed(slowed, "--max-slowdown", "1.5")[0] == 0
    code, said = timed(TIMES, before=slowed)
    assert code == 0
    assert "faster: 1" in said


def test_noise_passes(tmp_path):
    """Of an H200, the same code timed by two processes, whichever of them comes first."""
    trust = json.loads((ROOT / "docs" / "results" / "bench-trust-h200.json").read_text())
    pairs = [r for name in ("rerun", "rerun of calls that the host launches") for r in trust[name]["all"]]
    assert len(pairs) > 100

    def file(name):
        records = [
            {
                "fullname": "",
                "extra_info": {
                    "device": "cuda",
                    **{n: r[n] for n in ("workload", "backend", "noise", "graph")},
                },
                "stats": {"median": r[name] / 1e6, "iqr": 0.0},
            }
            for r in pairs
        ]
        return read_timings(written(tmp_path / name, {"benchmarks": records}))

    for old, new in (("microseconds", "again"), ("again", "microseconds")):
        found = {change.kind for change in compare_timings(file(old), file(new))}
        assert found == {Kind.AMBIGUOUS}, found


def test_a_difference_inside_the_noise_is_ambiguous_either_way(timed):
    slower, faster = ({c: f * t for c, t in TIMES.items()} for f in (1.3, 1 / 1.3))
    for medians in (slower, faster):
        code, said = timed(medians, extra={"noise": 0.4})
        assert code == 0
        assert "ambiguous: a difference inside the noise: 3" in said
        assert "faster" not in said
    assert timed(slower, extra={"noise": 0.2})[0] == 2
    # The noise of either file counts.
    assert timed(slower, extra={"noise": 0.0}, extra_before={"noise": 0.4})[0] == 0


def test_without_a_stated_noise_the_spread_tells(baseline, tmp_path):
    old, new = (bench(tmp_path / f"{i}.json", {"a": m}) for i, m in enumerate((1e-5, 1.2e-5)))
    document = json.loads(new.read_text())
    document["benchmarks"][0]["stats"]["iqr"] = 0.3e-5
    wide = written(tmp_path / "wide.json", document)
    assert [c.kind for c in compare_timings(read_timings(old), read_timings(new))] == [Kind.SLOWER]
    assert [c.kind for c in compare_timings(read_timings(old), read_timings(wide))] == [Kind.AMBIGUOUS]


def test_a_time_that_is_gone_or_invalid_fails(timed):
    fewer = {case: t for case, t in TIMES.items() if case != "moe/w4/t1"}
    assert timed(fewer)[0] == 2
    code, said = timed({**TIMES, "moe/w4/t1": "its answer is wrong"})
    assert code == 2
    assert "its answer is wrong" in said
    assert timed(TIMES, before=fewer)[0] == 0


def test_times_of_another_device_are_no_comparison(timed):
    code, said = timed(TIMES, extra={"device": "H200"}, extra_before={"device": "L4"})
    assert code == 3
    assert "another device" in said
    assert timed({"other": 1e-5})[0] == 3


def test_the_benchmarks_own_files_are_read(tmp_path):
    """Workloads for cases, and GPUs by the names that the run noted."""

    def file(name, gpu, seconds):
        extra = {"workload": "llama/m1", "backend": "humming", "device": "cuda", "noise": 0.02}
        record = {"fullname": "x", "extra_info": extra, "stats": {"median": seconds, "iqr": 0.0}}
        gpus = [f"{gpu}, sm_90, driver {name}"]
        return written(tmp_path / name, {"benchmarks": [record], "quantcts": {"environment": {"gpus": gpus}}})

    old, new, other = file("1", "H200", 1e-5), file("2", "H200", 2e-5), file("3", "H100", 2e-5)
    (change,) = compare_timings(read_timings(old), read_timings(new))
    assert (change.kind, change.backend, change.case) == (Kind.SLOWER, "humming", "llama/m1")
    with pytest.raises(RunError, match="another device"):
        compare_timings(read_timings(old), read_timings(other))


@pytest.mark.parametrize("value", [-1.0, 0, "fast", None, True])
def test_a_median_that_is_no_time_is_named(tmp_path, value):
    path = bench(tmp_path / "x.json", {"a": 1e-5})
    document = json.loads(path.read_text())
    document["benchmarks"][0]["stats"]["median"] = value
    with pytest.raises(RunError, match=r"x\.json: benchmarks/0: stats/median"):
        read_timings(written(path, document))


def test_a_file_of_pytest_benchmark_itself_is_read(tmp_path):
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "test_b.py").write_text(
        "def test_a(benchmark):\n"
        "    benchmark.extra_info.update(case='linear/x', backend='kernel')\n"
        "    benchmark(lambda: sum(range(100)))\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "test_b.py",
        "--benchmark-json=b.json",
        "--benchmark-max-time=0.1",
    ]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=alone)
    ((key, timing),) = read_timings(tmp_path / "b.json").items()
    assert key == ("kernel", "linear/x")
    assert timing.seconds > 0


# ---- the command


def test_conformance_is_worse_than_time(judged, baseline, tmp_path, capsys):
    worse, _ = judged("faulty.floor_words")
    old, new = (
        bench(tmp_path / "a.json", TIMES),
        bench(tmp_path / "b.json", {c: 2 * t for c, t in TIMES.items()}),
    )
    both = ("--baseline-bench", old, "--current-bench", new)
    assert gate(capsys, "--baseline", baseline, "--current", worse, *both)[0] == 1
    assert gate(capsys, "--baseline", baseline, "--current", baseline, *both)[0] == 2


def test_the_order_of_exit_codes():
    assert [int(worst(*codes)) for codes in ((0, 2), (2, 1), (1, 3), (3, 4), (0, 0))] == [2, 1, 3, 4, 0]
    assert worst(ExitCode.AS_EXPECTED) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--baseline", "base"),
        ("--baseline", "base", "--current", "nowhere.json"),
        ("--baseline", "base", "--current", "base", "--max-slowdown", "0.9"),
        ("--baseline", "base", "--current", "base", "--max-slowdown", "nan"),
        ("--baseline", "base", "--current", "base", "--current-bench", "base"),
        ("--baseline", "base", "--current", "base", "--baseline-bench", "base", "--current-bench", "base"),
        ("--baseline", "base", "--current", "base", "--markdown", "no/such/folder/x.md"),
    ],
)
def test_bad_arguments_end_with_3(baseline, capsys, arguments):
    code, said = gate(capsys, *(str(baseline) if a == "base" else a for a in arguments))
    assert code == 3
    assert said.splitlines()[-1].startswith("quantcts: ")


def test_markdown_holds_the_regressions_and_fits_a_comment(judged, baseline, tmp_path, capsys):
    worse, _ = judged("faulty.zero_point_plus_one")
    path = tmp_path / "gate.md"
    gate(capsys, "--baseline", baseline, "--current", worse, "--markdown", path)
    text = path.read_text()
    assert "gate is closed" in text
    assert "### Newly failing" in text
    assert "| kernel | `linear/w4-g32-asym/a16/bf16/" in text
    document = json.loads(baseline.read_text())
    many, now = copy.deepcopy(document), copy.deepcopy(document)
    for i in range(5000):
        record = {"backend": "kernel", "case": f"linear/{i}", "outcome": "conforms"}
        many["cases"].append(record)
        now["cases"].append({**record, "outcome": "diverges", "detail": "a|b " * 200})
    cut = markdown_of(decide(many, now))
    assert len(cut) < 60000
    assert "and 4900 more" in cut
    assert "a\\|b" in cut
    for i in range(1000):
        many["cases"].append({"backend": "kernel", "case": f"moe/{i}", "outcome": "conforms"})
        now["cases"].append(
            {"backend": "kernel", "case": f"moe/{i}", "outcome": "declines", "detail": "x" * 240}
        )
        many["cases"].append({"backend": "kernel", "case": f"swiglu/{i}", "outcome": "conforms"})
        many["cases"].append({"backend": "kernel", "case": f"routing/{i}", "outcome": "diverges"})
        now["cases"].append({"backend": "kernel", "case": f"routing/{i}", "outcome": "conforms"})
    decision = decide(many, now)
    cut = markdown_of(decision)
    assert len(cut) < 60000
    assert "and 4970 more" in cut
    listed = text_of(decision)
    assert all(f"  kernel routing/{i} " in listed for i in range(1000))  # what got better, all of it


def test_a_limit_without_times_is_told(baseline, capsys):
    code, said = gate(capsys, "--baseline", baseline, "--current", baseline, "--max-slowdown", "1.05")
    assert code == 0
    assert "note: no times were compared; give --baseline-bench and --current-bench as well" in said


def test_two_files_without_a_time_in_common_are_no_comparison(tmp_path):
    document = json.loads(bench(tmp_path / "x.json", {"a": 1e-5}).read_text())
    document["quantcts"] = {
        "untimed": [{"workload": "b", "backend": "kernel", "state": "declines", "reason": "no"}]
    }
    times = read_timings(written(tmp_path / "x.json", document))
    only = {key: timing for key, timing in times.items() if timing.seconds is None}
    assert only
    with pytest.raises(RunError, match="no times were compared"):
        compare_timings(only, only)
    document["quantcts"]["untimed"] = [None]
    with pytest.raises(RunError, match="quantcts/untimed: it holds something that is no object"):
        read_timings(written(tmp_path / "x.json", document))


def test_one_step_judges_then_compares(judged, baseline):
    """The run alone would pass: it declines honestly. The gate does not."""
    _, alone = judged("declining")
    assert alone.returncode == 0
    report, done = judged("declining", "--gate", baseline)
    assert done.returncode == 1
    assert "newly declined: " in done.stdout
    assert json.loads(report.read_text())["exit_code"] == 0
    assert judged("misbehaving.behaves", "--gate", baseline)[1].returncode == 0


def test_one_step_looks_at_the_baseline_before_anything_is_judged(judged, tmp_path):
    (tmp_path / "broken.json").write_text("{")
    _, done = judged("misbehaving.behaves", "--gate", tmp_path / "broken.json")
    assert done.returncode == 3
    assert "judged" not in done.stdout
    _, done = judged("misbehaving.behaves", "--subset")
    assert done.returncode == 3


def test_a_report_may_take_the_place_of_its_baseline(judged, baseline, tmp_path):
    (tmp_path / "report.json").write_bytes(baseline.read_bytes())
    place = tmp_path / "report.json"
    _, done = judged("declining", "--gate", place, "--report", place)
    assert done.returncode == 1
    assert "newly declined: " in done.stdout
