"""report.html and report.md, as text. What a browser makes of the page: test_report_browser.py."""

import base64
import gzip
import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from xml.etree import ElementTree

import pytest
from planted import ALL, HOSTILE, each_outcome, planted

from conformance.cases import all_cases
from conformance.cli import app, main
from conformance.errors import RunError
from conformance.report.markdown import LIMIT, report_markdown
from conformance.report.matrix import alone, in_order, place
from conformance.report.page import report_page
from conformance.report.pictures import draw
from conformance.report.plots import plots_of, read_bench
from conformance.verdict import Outcome, Verdict

NAME = "</script><b>|x|"  # of a backend, in a report that no run wrote


class Page(HTMLParser):
    """Tags with their attributes, the text of each block of data, and the text that is shown."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.blocks, self.shown, self._open = [], {}, [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id", "") if tag == "script" else tag

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open in ("cells", "cases"):
            self.blocks[self._open] = json.loads(gzip.decompress(base64.b64decode(data)))
        elif self._open not in ("style", ""):
            self.shown.append(data)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "report.json"
    return planted(path, [*each_outcome("one"), *each_outcome("two")], specs={"two": "my file.py:two"})


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Everything that a backend or a file can put into a report, hostile."""
    path = tmp_path_factory.mktemp("hostile") / "report.json"
    backend = NAME
    verdicts = [replace(v, detail=HOSTILE, note=HOSTILE) for v in each_outcome(backend)]
    verdicts.append(Verdict(f"linear/{HOSTILE}/a16/bf16/x/{HOSTILE}-0", backend, Outcome.CRASHES, HOSTILE))
    selection = {**ALL, "queries": [HOSTILE], "keyword": HOSTILE}
    change = {"absent": {HOSTILE: HOSTILE}, "gpus": [HOSTILE]}
    return planted(path, verdicts, selection, faults=[HOSTILE], change=change, specs={backend: HOSTILE})


def verdicts_in(page):
    """(backend, case) -> outcome, worst and detail, as the page's script reads them."""
    cells, cases = page.blocks["cells"], page.blocks["cases"]
    return {
        (backend, cases["ids"][case]): (
            cells["outcomes"][int(own["outcome"][i])], own["worst"][i], cases["texts"][own["detail"][i]]
        )
        for backend, own in zip(cells["backends"], cases["verdicts"], strict=True)
        for i, case in enumerate(own["case"])
    }  # fmt: skip


def test_the_page_holds_every_verdict(document):
    found = verdicts_in(Page(report_page(document)))
    assert found == {
        (c["backend"], c["case"]): (c["outcome"], c.get("worst"), c.get("detail", ""))
        for c in document["cases"]
    }


def test_the_cells_count_the_cases(document):
    page = Page(report_page(document))
    cells, cases = page.blocks["cells"], page.blocks["cases"]
    for backend, flat in enumerate(cells["cells"]):
        own = cases["verdicts"][backend]
        for i in range(0, len(flat), 10):
            table, row, column, worst, *counts = flat[i : i + 10]
            inside = [n for n, c in enumerate(own["case"]) if cases["places"][c] == [table, row, column]]
            assert counts == [sum(own["outcome"][n] == str(o) for n in inside) for o in range(6)]
            right = [
                own["worst"][n]
                for n in inside
                if own["outcome"][n] == str(cells["outcomes"].index("conforms"))
            ]
            assert worst == round(1000 * max(right, default=0))
            names = cells["tables"][table]
            for n in inside:
                shown = (names["title"], names["rows"][row], names["columns"][column])
                assert shown == place(cases["ids"][own["case"][n]])
        assert sum(sum(flat[i + 4 : i + 10]) for i in range(0, len(flat), 10)) == len(own["case"])


def test_the_page_needs_nothing_else(document):
    page = Page(report_page(document))
    assert {tag for tag, _ in page.tags} & {"link"} == {"link"}
    for tag, attributes in page.tags:
        assert "src" not in attributes
        assert tag != "link" or attributes["href"] == "data:,"
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none';")


def test_no_text_becomes_markup(document, hostile):
    """The tags of a page of hostile text are the tags of a page of harmless text."""
    wild = Page(report_page(hostile))
    plain = json.dumps(hostile).replace(json.dumps(HOSTILE)[1:-1], "harmless").replace(NAME, "plain")
    harmless = Page(report_page(json.loads(plain)))
    assert [tag for tag, _ in wild.tags] == [tag for tag, _ in harmless.tags]
    assert not [a for _, a in wild.tags if any(name.startswith("on") for name in a)]
    assert any(HOSTILE in text for text in wild.shown)
    assert HOSTILE in wild.blocks["cases"]["texts"]


def test_a_large_report_stays_small(tmp_path):
    cases = [i for i, c in all_cases().items() if c.quick][::4]
    long = "x" * 5000
    verdicts = [v for b in range(18) for v in each_outcome(f"backend-{b}", cases)]
    verdicts[1] = replace(verdicts[1], detail=long)
    page = report_page(planted(tmp_path / "r.json", verdicts))
    assert len(page.encode()) < 50_000 + 20 * len(verdicts)
    assert long not in page
    assert "and 3000 characters more in report.json" in "".join(Page(page).blocks["cases"]["texts"])


def test_the_command_repeats_the_case(document, hostile):
    command = alone({"set": "full"}, "my file.py:two", "linear/w3-g32-sym/a16/bf16/m1-n64-k128/random-0")
    assert shlex.split(command) == [
        "quantcts", "run", "--backend", "my file.py:two", "--cases", "linear/w3-g32-sym/a16/bf16/m1-n64-k128/random-0",
    ]  # fmt: skip
    assert shlex.split(alone({"set": "full"}, HOSTILE, HOSTILE))[-1] == HOSTILE
    assert alone({"set": "checkpoint"}, "mine", "checkpoint/model.layers.0/random").endswith(
        "--layers model.layers.0"
    )
    assert alone({"set": "quick", "vectors": {"version": "1"}}, "mine", "linear/x").endswith(" --vectors DIR")
    commands = Page(report_page(document)).blocks["cells"]["commands"]
    assert commands == [alone({"set": "full"}, spec, "CASE") for spec in ("one", "my file.py:two")]


def test_every_id_has_a_place():
    for case_id in all_cases():
        title, row, column = place(case_id)
        assert title.startswith(case_id.partition("/")[0])
        assert row
        assert column
    assert place("checkpoint/model.layers.0/random") == ("checkpoint", "model.layers.0", "random")
    assert place("linear") == ("linear", "-", "-")
    assert in_order(["g128 sym", "g32 asym", "channel asym", "g32 sym"]) == [
        "channel asym", "g32 sym", "g32 asym", "g128 sym",
    ]  # fmt: skip
    assert in_order(["strided", "batch"]) == ["strided", "batch"]


def test_pages_say_how_many_verdicts_stood(document):
    resumed = {**document, "resumed": 7}
    assert "7 verdicts of a run that was cut off stood" in " ".join(Page(report_page(resumed)).shown)
    assert "resumed: 7 verdicts stood" in report_markdown(resumed)
    assert "resumed" not in report_markdown(document)
    assert "cut off" not in " ".join(Page(report_page(document)).shown)


# ---- the benchmark's plots


def figures(
    layer="linear/llama-3.1-8b.gate_up/w4-g128-sym/a16/bf16", backends=("one", "two"), tokens=(1, 16, 256)
):
    """The benchmark's JSON as far as the plots read it."""
    records = [
        {
            "extra_info": {
                "layer": layer, "backend": backend, "tokens": m, "device": "cuda:0",
                "median_seconds": 1e-6 * (b + 2) * (m + 9), "fraction_of_floor": 0.8 / (b + 1),
                "floor_seconds": 1e-6 * m,
                "standing": "slower" if b else "fastest",
            }
        }
        for b, backend in enumerate(backends) for m in tokens
    ]  # fmt: skip
    return {"benchmarks": records, "quantcts": {"environment": {"gpus": ["NVIDIA H200"]}}}


def test_plots_stand_in_the_page_and_say_their_numbers(document):
    page = Page(report_page(document, figures()))
    paths = [
        a["d"]
        for tag, a in page.tags
        if tag == "path" and a["class"].startswith("line") and "8H39" not in a["d"]
    ]
    assert len(paths) == 2 * 2
    for path in paths:
        points = [tuple(map(float, point.split())) for point in path.removeprefix("M").split("L")]
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        assert len(points) == 3
        assert all(0 <= x <= 440 and 0 <= y <= 260 for x, y in points)
    # of the first chart both backends take longer with more tokens, the second longer than the first
    (one, two), (fraction, _) = paths[:2], paths[2:]
    heights = [[float(point.split()[1]) for point in path[1:].split("L")] for path in (one, two, fraction)]
    assert heights[0] == sorted(heights[0], reverse=True)
    assert all(lower < upper for lower, upper in zip(heights[1], heights[0], strict=True))
    assert len(set(heights[2])) == 1
    shown = " ".join(page.shown)
    for words in (
        "20 µs, 0.80 fastest",
        "30 µs, 0.40",
        "NVIDIA H200",
        "gate_up/w4-g128-sym/a16/bf16 on cuda:0",
    ):
        assert words in shown, words
    floors = [
        a["d"] for tag, a in page.tags if tag == "path" and a["class"] == "floor" and a["d"] != "M1 8H39"
    ]
    assert len(floors) == 2
    lowest = [float(point.split()[1]) for point in floors[0][1:].split("L")]
    assert all(below > above for below, above in zip(lowest, heights[0], strict=True))
    assert "Benchmark" not in " ".join(Page(report_page(document)).shown)


def test_plots_take_one_number_and_many_backends(document):
    names = [f"b{i}" for i in range(18)]
    page = Page(report_page(document, figures(backends=names, tokens=(1,))))
    lines = {
        (a["class"], a["stroke-dasharray"]) for tag, a in page.tags if tag == "path" and "line" in a["class"]
    }
    assert len(lines) == 18


def test_an_axis_has_few_marks_whatever_the_numbers(document):
    bench = figures()
    bench["benchmarks"][0]["extra_info"]["fraction_of_floor"] = 1e6
    assert len(report_page(document, bench)) < len(report_page(document, figures())) + 10_000


def test_hostile_words_of_a_benchmark_are_text(document):
    page = Page(report_page(document, figures(layer=HOSTILE, backends=[HOSTILE])))
    harmless = Page(report_page(document, figures(layer="x", backends=["x"])))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in harmless.tags]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("quantcts"), "it is not what `quantcts bench"),
        (lambda d: d.update(benchmarks={}), "it is not what `quantcts bench"),
        (lambda d: d["benchmarks"][4].pop("extra_info"), "benchmarks/4/extra_info/layer: missing"),
        (lambda d: d["benchmarks"][1]["extra_info"].update(tokens=0), "benchmarks/1/extra_info/tokens"),
        (
            lambda d: d["benchmarks"][1]["extra_info"].update(median_seconds="1"),
            "median_seconds: missing, or no float",
        ),
        (lambda d: d["benchmarks"][1]["extra_info"].update(fraction_of_floor=-1), "fraction_of_floor"),
        (
            lambda d: d["benchmarks"][1]["extra_info"].update(median_seconds=float("inf")),
            "Infinity is no number",
        ),
        (lambda d: d.update(quantcts=None), "it is not what `quantcts bench"),
        (lambda d: d["quantcts"].update(environment=[]), "it is not what `quantcts bench"),
    ],
)
def test_what_is_no_benchmark_is_one_clear_error(tmp_path, change, words):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(figures()))
    assert plots_of(read_bench(path))
    broken = figures()
    change(broken)
    path.write_text(json.dumps(broken))
    with pytest.raises(RunError, match=words):
        read_bench(path)


def test_a_picture_is_a_file_that_stands_alone(tmp_path):
    bench = figures(backends=["one", "<two>", *(f"of_many_{i}" for i in range(12))])
    bench["benchmarks"] += figures(layer="linear/once/w4", tokens=(1,))["benchmarks"]
    (place,) = draw(bench, tmp_path / "new" / "folder")
    assert place.name == "linear-llama-3.1-8b.gate_up-w4-g128-sym-a16-bf16.svg"
    picture = place.read_bytes()
    root = ElementTree.fromstring(picture)
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<two>", "of_many_11", "floor of the device", "fraction of the floor"} <= set(words)
    assert "--s0:" in picture.decode()
    _, _, wide, tall = map(float, root.get("viewBox").split())
    moved = [
        re.search(r"translate\(([\d.]+) ([\d.]+)\)", g.get("transform")) for g in root if g.get("transform")
    ]
    places = [tuple(map(float, found.groups())) for found in moved]
    assert len(set(places)) == len(places) == 14 + 1 + 2  # lines, the floor, charts
    assert all(x < wide and y < tall for x, y in places)
    assert max(y for _, y in places) == places[-1][1] > places[-3][1]
    (again,) = draw(bench, tmp_path)
    assert again.read_bytes() == picture


def test_pictures_want_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="it cannot be written there"):
        draw(figures(), tmp_path / "file")


def test_lines_can_be_told_from_the_page():
    """3 to 1, which is what WCAG asks of graphics, in light and in dark."""
    style = (files("conformance.report") / "templates" / "style.css").read_text()
    for block in re.findall(r":root \{(.*?)\n\s*\}", style, re.S):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        page = luminance(colours["page"])
        for number in range(6):
            line = luminance(colours[f"s{number}"])
            assert (max(line, page) + 0.05) / (min(line, page) + 0.05) >= 3, number


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# ---- report.md


def test_markdown_says_verdict_counts_matrix_findings_and_command(document):
    text = report_markdown(document)
    failing = sum(c["outcome"] in ("diverges", "dishonest", "crashes") for c in document["cases"])
    assert text.startswith(f"## QuantCTS: ✗ {failing} of {len(document['cases'])} cases fail")
    for backend in ("one", "two"):
        own = Counter(c["outcome"] for c in document["cases"] if c["backend"] == backend)
        counts = [own[o] for o in ("conforms", "diverges", "dishonest", "crashes", "waived", "declines")]
        assert f"| {backend} | {' | '.join(map(str, counts))} |" in text
    assert f"### {len(document['findings'])} findings" in text
    assert "quantcts run --backend 'my file.py:two' --cases " in text
    assert "### Matrices with failures" in text
    left = len(document["findings"]) - 10
    assert f"Left out: {left} findings" in text


def test_markdown_never_outgrows_a_comment(tmp_path):
    cases = list(all_cases())[::7]
    verdicts = [
        replace(v, detail=f"{i} {v.detail} " + "long " * 400)
        for b in range(40) for i, v in enumerate(each_outcome(f"b{b}-" + "n" * 300, cases[b::40]))
    ]  # fmt: skip
    faults = ["a problem " * 500] * 50
    selection = {**ALL, "queries": ["q" * 3000] * 90, "keyword": "k" * 70000}
    text = report_markdown(planted(tmp_path / "r.json", verdicts, selection, faults=faults))
    assert LIMIT * 0.6 < len(text) < LIMIT
    assert re.search(r"Left out: .*matrices", text)
    assert "report.json and report.html have everything" in text


def test_markdown_of_hostile_text_is_text(hostile):
    text = report_markdown(hostile)
    outside = re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", text)
    outside = re.sub(r"(`+) .*? \1", "", outside)
    assert "<script" not in outside
    assert "<img" not in outside
    assert "](http" not in outside
    assert "@all" not in outside
    assert "http://" not in outside
    assert not re.search(r"(?<!&)#1", outside)
    heads = [line for line in outside.splitlines() if line.startswith("| :--")]
    for line in outside.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in {len(re.findall(r"\|", head)) for head in heads}


def test_a_good_run_is_short(tmp_path):
    verdicts = [
        Verdict(case, "fine", Outcome.CONFORMS, worst=0.5, elements=9) for case in list(all_cases())[::50]
    ]
    text = report_markdown(planted(tmp_path / "r.json", verdicts))
    assert text.startswith(f"## QuantCTS: ✓ all {len(verdicts)} judged cases conform\n")
    assert "finding" not in text
    assert "Left out" not in text
    assert len(text) < 2500


# ---- the commands


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return ended.value.code


def test_the_commands_write_the_pages(document, tmp_path, capsys):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(document))
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(figures()))
    main(["report", "html", str(report), "-o", str(tmp_path / "b.html"), "--bench", str(bench)])
    assert (tmp_path / "b.html").read_text() == report_page(document, figures())
    main(["report", "html", str(report), "-o", str(tmp_path / "r.html")])
    main(["report", "markdown", str(report), "-o", str(tmp_path / "r.md")])
    assert (tmp_path / "r.html").read_text() == report_page(document)
    assert (tmp_path / "r.md").read_text() == report_markdown(document)
    assert re.search(r"r\.html: \d+ verdicts, \d+ kB", capsys.readouterr().out)
    assert app.registered_groups[0].name == "report"


def test_a_place_that_is_none_is_one_clear_error(document, tmp_path, capsys):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(document))
    assert call("report", "html", report, "-o", tmp_path / "no" / "r.html") == 3
    assert "r.html: it cannot be written there: No such file" in capsys.readouterr().err
    assert call("report", "html", tmp_path / "none.json") == 3
    assert "none.json: No such file" in capsys.readouterr().err


def test_a_run_writes_them_too(quantcts, tmp_path):
    pages = [tmp_path / "r.html", tmp_path / "r.md"]
    run = quantcts(
        "run",
        "--backend",
        "numpy",
        "--cases",
        "packing/w4",
        "--report-html",
        pages[0],
        "--report-markdown",
        pages[1],
    )
    assert run.code == 0, run.output
    assert Page(pages[0].read_text()).blocks["cells"]["backends"] == ["numpy"]
    assert "✓ all " in pages[1].read_text()
    run = quantcts("run", "--backend", "numpy", "--cases", "packing/w4", "--report-html", tmp_path)
    assert run.code == 3
    assert "--report-html" in run.output
    assert not list(tmp_path.glob("*.part"))
