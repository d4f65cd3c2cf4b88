"""The conformance statement: what it says, and that --verify sees every change."""

import gzip
import hashlib
import json
from dataclasses import replace

import jsonschema
import pytest
from planted import ALL, HOSTILE, each_outcome, planted
from test_report_merge import call, conforming
from test_report_pages import Page

from conformance.cases import all_cases
from conformance.cli import main
from conformance.errors import RunError
from conformance.report.document import write_atomically
from conformance.report.merge import merge
from conformance.report.statement import (
    digest,
    read_statement,
    schema,
    statement,
    statement_page,
    unchecked,
    verify,
    write,
)
from conformance.verdict import Outcome, Verdict

IDS = list(all_cases())
FP16 = "linear/w4-g32-sym/a16/fp16"
WAIVED = "a known fault (https://example.org/1) [crashes: 3 of 4 elements are wrong]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of two backends, one of them with waivers and declined cells, and a manifest of vectors."""
    path = tmp_path_factory.mktemp("statement")
    verdicts = [
        *conforming("mine", [i for i in IDS if i.startswith("linear/w4-g32-sym/a16/bf16/")]),
        Verdict(f"{FP16}/m1-n64-k128-bias/random-0", "mine", Outcome.CONFORMS, worst=0.75, elements=8),
        *(Verdict(i, "mine", Outcome.WAIVED, WAIVED) for i in IDS if i.startswith("packing/w4/dim0/n7")),
        *(Verdict(i, "mine", Outcome.DECLINES, "no") for i in IDS if i.startswith("moe/w2-g32-sym/a16/bf16/silu/")),
    ]  # fmt: skip
    change = {"gpus": ["NVIDIA H200, sm_90, driver 580.1"]}
    planted(path / "report.json", [*verdicts, *each_outcome("other")], change=change)
    (path / "vectors").mkdir()
    (path / "vectors" / "manifest.json").write_text(json.dumps({"version": "1.2.3", "files": {}}))
    return path


@pytest.fixture(scope="module")
def said(folder):
    return statement(folder / "report.json", "ACME", "mine", folder / "vectors")


def test_it_says_what_the_report_holds(folder, said):
    jsonschema.Draft202012Validator(schema()).validate(said)
    document = json.loads((folder / "report.json").read_text())
    own = [c for c in document["cases"] if c["backend"] == "mine"]
    assert said["counts"]["cases"] == len(own)
    assert said["counts"]["conforms"] == sum(c["outcome"] == "conforms" for c in own)
    assert said["verdict"] == "conforms but for waivers"
    assert said["scope"]["whole"] is True
    assert said["largest_error"]["fraction_of_bound"] == 0.75
    assert said["largest_error"]["case"].startswith("linear/w4-g32-sym/a16/fp16/")
    assert [c["cell"] for c in said["claimed"]] == [
        "packing/w4",
        "linear/w4-g32-sym/a16/bf16",
        "linear/w4-g32-sym/a16/fp16",
    ]
    assert said["declined"] == ["moe/w2-g32-sym/a16/bf16/silu"]
    assert [w["reason"] for w in said["waivers"]] == ["a known fault (https://example.org/1)"]
    assert said["environment"]["gpus"] == ["NVIDIA H200, sm_90, driver 580.1"]
    assert said["environment"]["packages"]["numpy"]
    manifest = (folder / "vectors" / "manifest.json").read_bytes()
    assert said["vectors"] == {"version": "1.2.3", "sha256": hashlib.sha256(manifest).hexdigest()}
    assert said["report"]["sha256"] == hashlib.sha256((folder / "report.json").read_bytes()).hexdigest()
    assert said["suite"]["specification"] == document["environment"]["specification"]
    other = statement(folder / "report.json", "ACME", "other", None)
    assert other["verdict"] == "fails"
    assert other["largest_error"]["fraction_of_bound"] is None  # what has to be exact is wrong
    assert {c["verdict"] for c in other["claimed"]} == {"conforms", "conforms but for waivers", "fails"}
    assert other["vectors"] is None


def leaves(value, place=()):
    if isinstance(value, dict) and value:
        for name, member in value.items():
            yield from leaves(member, (*place, name))
    elif isinstance(value, list) and value:
        for i, member in enumerate(value):
            yield from leaves(member, (*place, i))
    else:
        yield place, value


def changed(value):
    """Another value that the schema takes in the same place, if there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        if len(value) == 64:
            return "0" * 64
        return value[:-1] + ("1" if value[-1:] != "1" else "2")
    return ["one more"] if isinstance(value, list) else {"one": 1} if isinstance(value, dict) else 0.5


def test_verify_agrees_with_what_was_written(folder, said):
    assert verify(said, folder / "report.json", folder / "vectors") == []
    assert verify(said, folder / "report.json", None) == []


def test_vectors_that_cannot_be_looked_at_are_said_to_be_unchecked(folder, said, tmp_path, capsys):
    report, own = folder / "report.json", folder / "vectors"
    without = statement(report, "ACME", "mine", None)
    assert verify(without, report, own) == []
    assert unchecked(without, own) == "vectors: it names none"
    assert unchecked(said, None) == "vectors: give their folder with --vectors"
    assert unchecked(said, own) == ""
    write(tmp_path / "s.json", without)
    with pytest.raises(SystemExit) as ended:
        main(["statement", str(report), "--verify", str(tmp_path / "s.json"), "--vectors", str(own)])
    assert ended.value.code == 0
    assert "not checked: vectors: it names none" in capsys.readouterr().out


def test_a_waiver_improves_no_error(tmp_path):
    wrong = Verdict("packing/w4/dim0/n7-k31/ramp-0", "mine", Outcome.DIVERGES, "3 of 4 elements are wrong")
    waived = replace(
        wrong, outcome=Outcome.WAIVED, detail=f"a fault (https://x.org) [diverges: {wrong.detail}]"
    )
    near = Verdict(f"{FP16}/m1-n64-k128-bias/random-0", "mine", Outcome.CONFORMS, worst=0.75, elements=8)
    found = []
    for verdict in (wrong, waived):
        planted(tmp_path / "r.json", [verdict, near])
        found.append(statement(tmp_path / "r.json", "ACME", None, None)["largest_error"])
    assert found[0] == found[1] == {"fraction_of_bound": None, "case": wrong.case}


def test_of_a_merged_report_the_machine_is_that_of_the_backend(tmp_path):
    parts = []
    for name, gpu, python in (("one", "L4", "3.11"), ("two", "H200", "3.12"), ("two", "H200", "3.13")):
        verdicts = conforming(name, IDS[len(parts) : len(parts) + 1])
        change = {"gpus": [f"NVIDIA {gpu}, sm_90, driver 1"], "python": python}
        parts.append(
            (tmp_path / f"{len(parts)}", planted(tmp_path / f"{len(parts)}", verdicts, change=change))
        )
    write_atomically(tmp_path / "m.json", merge(parts, ["quantcts"]))
    said = statement(tmp_path / "m.json", "ACME", "two", None)
    assert said["environment"]["gpus"] == ["NVIDIA H200, sm_90, driver 1"]
    assert said["environment"]["python"] == "3.12 | 3.13"
    assert statement(tmp_path / "m.json", "ACME", "one", None)["environment"]["python"] == "3.11"
    assert verify(said, tmp_path / "m.json", None) == []


@pytest.mark.parametrize("signed", [False, True], ids=["the digest stays", "the digest is made anew"])
def test_verify_catches_each_field_changed(folder, said, signed):
    """Every leaf of the document, one at a time. Who makes the digest anew can still put in another vendor or day."""
    places = [place for place, _ in leaves(said) if place != ("digest",)]
    assert len(places) > 60
    for place in places:
        forged = json.loads(json.dumps(said))
        inner = forged
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = changed(inner[place[-1]])
        if signed:
            forged["digest"] = digest(forged)
        if place[:2] == ("backend", "name"):
            with pytest.raises(RunError, match="--backend min"):
                verify(forged, folder / "report.json", folder / "vectors")
            continue
        found = verify(forged, folder / "report.json", folder / "vectors")
        names = {line.partition(":")[0] for line in found}
        if place in (("vendor",), ("made",)):
            assert names == (set() if signed else {"digest"})
        else:
            assert len(names) == (1 if signed else 2)
            assert any(name.startswith("/".join(map(str, place))) for name in names), place
            assert ("digest" in names) is not signed


def test_verify_catches_what_is_left_out_and_added(folder, said):
    for change in (
        lambda d: d["claimed"].pop(), lambda d: d["declined"].append("x"), lambda d: d["waivers"].clear(),
        lambda d: d["environment"].pop("gpus"), lambda d: d["counts"].update(more=1),
    ):  # fmt: skip
        forged = json.loads(json.dumps(said))
        change(forged)
        forged["digest"] = digest(forged)
        assert len(verify(forged, folder / "report.json", None)) == 1


def test_another_report_is_seen(folder, said, tmp_path):
    document = json.loads((folder / "report.json").read_text())
    record = next(c for c in document["cases"] if c["backend"] == "mine" and c.get("worst") == 0.25)
    record["worst"] = 0.26
    (tmp_path / "report.json").write_text(json.dumps(document))
    places = [line.partition(":")[0] for line in verify(said, tmp_path / "report.json", None)]
    assert places == ["report/sha256", "claimed/1/worst"]


def test_a_compressed_report_is_the_same_report(folder, said, tmp_path):
    (tmp_path / "r.json.gz").write_bytes(gzip.compress((folder / "report.json").read_bytes()))
    assert verify(said, tmp_path / "r.json.gz", None) == []


@pytest.mark.parametrize(
    ("selection", "whole"),
    [
        (ALL, True),
        ({**ALL, "set": "quick"}, False),
        ({**ALL, "shard": "1,2/3"}, False),
        ({**ALL, "queries": ["linear/*"]}, False),
        ({**ALL, "keyword": "w4"}, False),
    ],
)
def test_a_part_of_the_matrix_is_called_a_part(tmp_path, selection, whole):
    planted(tmp_path / "r.json", conforming("mine", IDS[:4]), selection)
    said = statement(tmp_path / "r.json", "ACME", None, None)
    assert said["scope"]["whole"] is whole
    assert said["verdict"] == "conforms"
    assert ("a statement on a part of the matrix" in statement_page(said)) is not whole


def test_problems_of_the_run_and_failures_show(tmp_path):
    planted(tmp_path / "r.json", conforming("mine", IDS[:4]), faults=["x: skipped"])
    said = statement(tmp_path / "r.json", "ACME", None, None)
    assert said["verdict"] == "fails"
    assert {c["verdict"] for c in said["claimed"]} == {"conforms"}
    assert said["report"]["problems"] == ["x: skipped"]


def test_what_no_statement_can_be_made_of(folder, tmp_path):
    with pytest.raises(RunError, match="it holds mine, other; name one with --backend"):
        statement(folder / "report.json", "ACME", None, None)
    with pytest.raises(RunError, match=r"--backend his: .*holds mine, other"):
        statement(folder / "report.json", "ACME", "his", None)
    with pytest.raises(RunError, match="--vendor"):
        statement(folder / "report.json", " ", "mine", None)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(RunError, match=r"manifest\.json: version"):
        statement(folder / "report.json", "ACME", "mine", tmp_path)
    planted(tmp_path / "r.json", [Verdict(IDS[0], "mine", Outcome.DECLINES, "no")])
    with pytest.raises(RunError, match="nothing of mine was judged"):
        statement(tmp_path / "r.json", "ACME", None, None)
    chosen = {"set": "checkpoint", "queries": [], "keyword": ""}
    planted(tmp_path / "c.json", [Verdict("checkpoint/a/random", "mine", Outcome.CONFORMS)], chosen)
    with pytest.raises(RunError, match="it is about a checkpoint"):
        statement(tmp_path / "c.json", "ACME", None, None)


def test_the_page_says_it_and_escapes_it(folder):
    said = statement(folder / "report.json", HOSTILE, "mine", None)
    text = statement_page(said)
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert any(HOSTILE in shown for shown in page.shown)
    for words in (
        "0.75",
        "NVIDIA H200, sm_90, driver 580.1",
        said["report"]["sha256"],
        said["digest"],
        "packing/w4",
    ):
        assert any(words in shown for shown in page.shown), words


def test_the_command_writes_and_checks(folder, tmp_path, capsys):
    out, page = tmp_path / "statement.json", tmp_path / "statement.html"
    asked = ("statement", folder / "report.json", "--vectors", folder / "vectors")
    assert call(*asked, "--vendor", "ACME", "--backend", "mine", "-o", out, "--html", page) == 0
    assert page.read_text() == statement_page(read_statement(out))
    assert call(*asked, "--verify", out) == 0
    said = json.loads(out.read_text())
    said["counts"]["conforms"] += 1
    out.write_text(json.dumps(said))
    capsys.readouterr()
    assert call(*asked, "--verify", out) == 1
    assert "counts/conforms: the statement says" in capsys.readouterr().out
    del said["vendor"]
    out.write_text(json.dumps(said))
    assert call(*asked, "--verify", out) == 3
    assert "'vendor' is a required property" in capsys.readouterr().err
    assert call(*asked, "--backend", "mine") == 3
    assert "--vendor" in capsys.readouterr().err
