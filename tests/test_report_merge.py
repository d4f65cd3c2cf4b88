"""quantcts report merge, quantcts report diff."""

import json
from dataclasses import replace

import pytest
from planted import ALL, each_outcome, planted

from conformance.cases import all_cases
from conformance.cli import main
from conformance.errors import RunError
from conformance.exitcodes import ExitCode
from conformance.report.difference import Change, difference, lines, regressed
from conformance.report.document import read
from conformance.report.merge import merge
from conformance.verdict import Outcome, Verdict

IDS = list(all_cases())
FAULTY = "tests/backends/faulty.py:zero_point_plus_one"


def call(*arguments):
    """The exit code of a command."""
    try:
        main([str(a) for a in arguments])
    except SystemExit as ended:
        return ended.code
    return 0


def judged(record):
    """A case of a report without what is measured anew in each run, with its kernels and clauses by number."""
    return {name: value for name, value in record.items() if not name.endswith("_seconds")}


def conforming(backend, cases):
    return [Verdict(case, backend, Outcome.CONFORMS, worst=0.25, elements=3) for case in cases]


# ---- merge


def test_shards_of_a_real_run_join_to_the_whole_run(quantcts, tmp_path):
    asked = ("--backend", "numpy", "--backend", FAULTY, "--cases", "{packing,dequantize}/w4*", "--quick")
    whole = quantcts("run", *asked).report
    for shard in ("1/3", "2/3", "3/3"):
        file = tmp_path / f"{shard[0]}.json.gz"
        assert quantcts("run", *asked, "--shard", shard, "--report", file).code in (0, 1)
    code = call(
        "report", "merge", *(tmp_path / f"{i}.json.gz" for i in (2, 3, 1)), "-o", tmp_path / "m.json.gz"
    )
    merged = read(tmp_path / "m.json.gz")
    assert code == merged["exit_code"] == whole["exit_code"] == 1
    for name in ("ledger", "selection", "confidence", "schema"):
        assert merged[name] == whole[name], name
    by_name = {f"{c['case']}@{c['backend']}": judged(c) for c in whole["cases"]}
    for record in merged["cases"]:
        own = by_name.pop(f"{record['case']}@{record['backend']}")
        assert merged["clauses"][record["clauses"]] == whole["clauses"][own["clauses"]]
        assert judged(record) | {"clauses": 0} == own | {"clauses": 0}
    assert not by_name
    assert sorted(map(str, merged["findings"])) == sorted(map(str, whole["findings"]))
    backends = sorted(whole["environment"]["backends"], key=lambda b: b["name"])
    assert merged["environment"]["backends"] == backends
    assert backends[1]["spec"] == FAULTY
    assert [part["shard"] for part in merged["parts"]] == ["2/3", "3/3", "1/3"]
    assert all("--shard" in part["command"] for part in merged["parts"])


def test_machines_join_side_by_side(tmp_path):
    h100, h200 = ({"gpus": [f"NVIDIA {name}, sm_90, driver 1"]} for name in ("H100", "H200"))
    one = planted(tmp_path / "1", conforming("one", IDS[:9]), change=h100)
    two = planted(tmp_path / "2", each_outcome("two", IDS[:9]), change=h200)
    merged = merge([(tmp_path / "1", one), (tmp_path / "2", two)], ["quantcts"])
    assert [c["case"] for c in merged["cases"]] == [case for case in IDS[:9] for _ in range(2)]
    assert merged["environment"]["gpus"] == [*h100["gpus"], *h200["gpus"]]
    assert [part["environment"]["gpus"] for part in merged["parts"]] == [h100["gpus"], h200["gpus"]]
    assert merged["exit_code"] == 1
    assert merged["ledger"]["planned"] == 18
    three = planted(tmp_path / "3", conforming("three", IDS[:9]))
    again = merge([(tmp_path / "m", merged), (tmp_path / "3", three)], ["quantcts"])
    assert [part["backends"] for part in again["parts"]] == [["one"], ["two"], ["three"]]


def test_what_is_in_two_parts_counts_once_and_must_agree(tmp_path):
    one = planted(tmp_path / "1", conforming("b", IDS[:5]))
    two = planted(tmp_path / "2", conforming("b", IDS[3:8]))
    merged = merge([(tmp_path / "1", one), (tmp_path / "2", two)], [])
    assert merged["ledger"]["planned"] == merged["ledger"]["conforms"] == 8
    other = [replace(v, outcome=Outcome.DIVERGES) for v in conforming("b", IDS[3:8])]
    planted(tmp_path / "2", other)
    with pytest.raises(RunError, match=rf"2: {IDS[3]} of b diverges, in .*1 it conforms"):
        merge([(tmp_path / "1", one), (tmp_path / "2", read(tmp_path / "2"))], [])


def change_backend(field, value):
    def change(document):
        document["environment"]["backends"][0][field] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="quantcts-report/2"), "schema: it is quantcts-report/2"),
        (lambda d: d["environment"]["packages"].update(quantcts="9.9"), "packages/quantcts: it is 9.9"),
        (lambda d: d["environment"].update(specification="0.1"), "specification: it is 0.1"),
        (lambda d: d["environment"].pop("specification"), "specification: it is not said"),
        (lambda d: d["selection"].update(set="quick"), "selection/set: it is quick"),
        (lambda d: d["selection"].update(queries=["moe/*"]), "selection/queries"),
        (lambda d: d["selection"].update(keyword="w3"), "selection/keyword: it is w3"),
        (
            lambda d: d["selection"].update(
                vectors={"version": "1", "sha256": "0", "without_expectation": {}}
            ),
            "selection/vectors",
        ),
        (lambda d: d["selection"].update(shard="1/2"), "shards are cut alike"),
        (change_backend("device", "cuda"), "backend b: device is cuda"),
        (change_backend("contract", {"weights": "any"}), "backend b: contract is"),
        (change_backend("libraries", {"torch": "1"}), "backend b: libraries is"),
        (lambda d: d["environment"].update(processor="pdp11"), "backend b: machine is Linux pdp11"),
    ],
)
def test_what_is_not_one_run_is_not_joined(tmp_path, change, words):
    one = planted(tmp_path / "1.json", conforming("b", IDS[:4]))
    two = json.loads(json.dumps(one))
    assert merge([(tmp_path / "1.json", one), (tmp_path / "2.json", two)], [])
    change(two)
    with pytest.raises(RunError, match=words):
        merge([(tmp_path / "1.json", one), (tmp_path / "2.json", two)], [])


def test_a_backend_on_two_kinds_of_gpu_is_two(tmp_path):
    one = planted(tmp_path / "1", conforming("b", IDS[:4]), change={"gpus": ["H100"]})
    change_backend("device", "cuda")(one)
    two = json.loads(json.dumps(one))
    two["environment"]["gpus"] = ["H100", "H100"]
    assert merge([(tmp_path / "1", one), (tmp_path / "2", two)], [])
    two["environment"]["gpus"] = ["H200"]
    with pytest.raises(RunError, match=r"backend b: GPU is \['H200'\], in .*1 it is \['H100'\]"):
        merge([(tmp_path / "1", one), (tmp_path / "2", two)], [])


def test_shards_that_are_missing_are_said(tmp_path):
    def shard(number, backend):
        path = tmp_path / f"{number}-{backend}"
        chosen = {**ALL, "shard": f"{number}/3"}
        return path, planted(path, conforming(backend, IDS[number::3][:4]), chosen)

    merged = merge([shard(3, "a"), shard(1, "a")], [])
    assert merged["selection"]["shard"] == "1,3/3"
    path = tmp_path / "m.json"
    path.write_text(json.dumps(merged))
    assert merge([(path, read(path)), shard(2, "a")], [])["selection"]["shard"] == "1/1"
    with pytest.raises(RunError, match="of a there is 1,3 of 3, of b 1; add the shards that are missing"):
        merge([shard(1, "a"), shard(3, "a"), shard(1, "b")], [])


def test_problems_and_breakdowns_are_kept(tmp_path):
    one = planted(tmp_path / "1", conforming("b", IDS[:4]), {**ALL, "shard": "1/2"})
    two = planted(tmp_path / "2", conforming("b", IDS[4:8]), {**ALL, "shard": "2/2"}, faults=["x: skipped"])
    merged = merge([(tmp_path / "1", one), (tmp_path / "2", two)], [])
    assert merged["ledger"]["problems"] == ["x: skipped"]
    assert merged["exit_code"] == ExitCode.CONFORMANCE
    two["exit_code"] = int(ExitCode.ENVIRONMENT)
    assert merge([(tmp_path / "1", one), (tmp_path / "2", two)], [])["exit_code"] == ExitCode.ENVIRONMENT


def test_reports_of_checkpoints_are_not_joined(tmp_path):
    chosen = {"set": "checkpoint", "queries": [], "keyword": ""}
    verdicts = [Verdict("checkpoint/layer/random", "b", Outcome.CONFORMS)]
    one = planted(tmp_path / "1", verdicts, chosen)
    with pytest.raises(RunError, match="do not say which one it was"):
        merge([(tmp_path / "1", one), (tmp_path / "2", one)], [])


def test_the_command_of_merge(tmp_path, capsys):
    for i in (1, 2):
        planted(tmp_path / f"{i}.json", conforming("b", IDS[i::2][:4]), {**ALL, "shard": f"{i}/2"})
    out = tmp_path / "m.json"
    assert call("report", "merge", tmp_path / "1.json", "-o", out) == 3
    assert "at least two reports" in capsys.readouterr().err
    assert call("report", "merge", tmp_path / "1.json", tmp_path / "2.json", "-o", out) == 0
    assert read(out)["selection"]["shard"] == "1/1"
    assert (
        call("report", "merge", tmp_path / "1.json", tmp_path / "2.json", "-o", tmp_path / "no" / "m.json")
        == 3
    )
    document = json.loads((tmp_path / "1.json").read_text())
    document["ledger"]["conforms"] += 1
    (tmp_path / "1.json").write_text(json.dumps(document))
    assert call("report", "merge", tmp_path / "1.json", tmp_path / "2.json", "-o", tmp_path / "n.json") == 3
    assert "ledger/conforms: it says 5, of the cases it is 4" in capsys.readouterr().err
    assert not (tmp_path / "n.json").exists()


# ---- diff


def report_of(path, outcomes, backend="b"):
    """outcomes: a letter a case, `.` for one that is not judged."""
    letters = {outcome.value[0] + outcome.value[1]: outcome for outcome in Outcome}
    verdicts = [
        Verdict(IDS[i], backend, letters[word], "why")
        for i, word in enumerate(outcomes.split()) if word != "."
    ]  # fmt: skip
    return planted(path, verdicts)


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("co", "di", Change.FAILS),
        ("wa", "cr", Change.FAILS),
        ("de", "di", Change.FAILS),
        (".", "di", Change.FAILS),
        ("di", "cr", Change.OTHERWISE),
        ("co", "de", Change.DECLINES),
        ("di", "de", Change.DECLINES),
        ("di", "wa", Change.WAIVED),
        ("co", "wa", Change.WAIVED),
        ("di", "co", Change.CONFORMS),
        ("de", "co", Change.CONFORMS),
        ("wa", "co", Change.CONFORMS),
        ("co", ".", Change.GONE),
        (".", "co", Change.ADDED),
        (".", "de", Change.ADDED),
        ("co", "co", None),
        ("di", "di", None),
    ],
)
def test_each_step(tmp_path, before, after, change):
    old = report_of(tmp_path / "old", f"co {before} di")
    new = report_of(tmp_path / "new", f"co {after} di")
    found = difference(old, new)
    assert {c: [s.case for s in steps] for own in found.values() for c, steps in own.items()} == (
        {change: [IDS[1]]} if change else {}
    )
    assert regressed(found) == (change is Change.FAILS)


def test_diff_speaks_of_each_backend_and_ends_with_its_code(tmp_path, capsys):
    same = conforming("same", IDS[:20])
    old, new, better = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "better.json.gz"
    planted(old, [*same, *conforming("worse", IDS[:20])])
    worse = [Verdict(case, "worse", Outcome.DIVERGES, "far off") for case in IDS[:20]]
    planted(new, [*same, *worse])
    planted(better, [*same, *conforming("worse", IDS[:20]), *conforming("added", IDS[:2])])
    assert call("report", "diff", old, new) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "worse: 20 cases: newly fails"
    assert said[1] == f"  {IDS[0]}  (conforms -> diverges): far off"
    assert said[-1] == "  and 10 more (--all)"
    assert call("report", "diff", old, new, "--all") == 1
    assert len(capsys.readouterr().out.splitlines()) == 21
    assert call("report", "diff", new, better) == 0
    assert capsys.readouterr().out.splitlines()[0] == "added: 2 cases: is judged for the first time"
    assert call("report", "diff", old, old) == 0
    assert capsys.readouterr().out == "no verdict changed\n"


def test_diff_says_that_the_suite_is_another(tmp_path, capsys):
    planted(tmp_path / "old", conforming("b", IDS[:2]), {**ALL, "set": "quick"})
    planted(tmp_path / "new", conforming("b", IDS[:2]))
    assert call("report", "diff", tmp_path / "old", tmp_path / "new") == 0
    assert "the set is another: quick -> full" in capsys.readouterr().out
    assert lines({}, None) == ["no verdict changed"]
