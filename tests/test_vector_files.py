"""Files of vectors: drift is named, and whatever is wrong with them is one clear error, never a crash."""

import contextlib
import hashlib
import json
import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cases import all_cases
from conformance.errors import RunError
from conformance.exitcodes import ExitCode
from conformance.vectors import made
from conformance.vectors.document import open_set
from conformance.vectors.made import make
from conformance.vectors.stored import Stored
from conformance.vectors.tensors import VectorError, decode, encode

sys.path.insert(0, str(ROOT / "tools"))
import fixtures

PACKING = "packing/w3/dim1/n10-k33/uniform-0"
LINEAR = "linear/w4-g32-sym/a-int8/bf16/m3-n10-k96/golden-0"
SMALL = (
    PACKING,
    LINEAR,
    "dequantize/w4-g32-asym/bf16/n10-k96/golden-0",
    "sharding/w2-channel-sym/ep2/e5-h50-i34-bias/uniform-0",
    "sharding/w4-channel-sym/tp2/e2-h50-i18/illegal-0",
    "moe/w2-channel-sym/a16/fp16/swigluoai-halves/t3-e4-k1-h33-i17/shared-0",
    "activation_quantization/a-fp8-static/bf16/m5-k33/saturation-0",
    "routing/softmax/bf16/t33-e8-k2/random-0",
    "moe_align/b16/t3-e128-k8/dropped-0",
    "swiglu/swigluoai/bf16/m3-i17/limits-0",
    "validation/w3-g32-asym/bf16/scale-shape",
    "validation/w3-g32-asym/bf16/code-range",
)


@pytest.fixture(scope="module")
def contents():
    """The files of a small set."""
    return make([all_cases()[i] for i in SMALL])


@pytest.fixture
def folder(contents, tmp_path):
    place = tmp_path / "set"
    place.mkdir()
    for name, content in contents.items():
        (place / name).write_bytes(content)
    return place


def test_the_small_set_is_sound(folder):
    found = Stored(open_set(folder))
    assert set(found.cases) == set(SMALL)


# ---- drift


def test_the_files_are_what_the_oracle_says():
    assert fixtures.drift(ROOT / "fixtures") == []


@pytest.fixture
def drifting(monkeypatch, contents):
    """The tool, on the small set."""
    monkeypatch.setattr(fixtures, "make", lambda: make([all_cases()[i] for i in SMALL]))
    return fixtures


def test_it_is_quiet_where_nothing_drifted(drifting, folder):
    drifting.write(folder)
    assert drifting.drift(folder) == []
    assert drifting.main(["--check", "--folder", str(folder)]) == ExitCode.AS_EXPECTED


def test_a_byte_of_a_tensor_drifts_with_id_and_tensor(drifting, folder, contents, capsys):
    drifting.write(folder)
    content = bytearray(contents["packing.safetensors"])
    content[-1] ^= 1  # the codes lie last: they have the smallest items
    (folder / "packing.safetensors").write_bytes(content)
    assert drifting.main(["--check", "--folder", str(folder)]) == ExitCode.CONFORMANCE
    said = capsys.readouterr().err
    assert "packing.safetensors: its bytes differ" in said
    assert "validation/w3-g32-asym/bf16/code-range: " in said or f"{PACKING}: inputs/codes" in said


def test_another_oracle_drifts_with_id_and_tensor(drifting, folder, monkeypatch):
    drifting.write(folder)
    right = made.dequantize

    def wrong(weight):
        matrix = right(weight).copy()
        matrix[3, 5] += 1
        return matrix

    monkeypatch.setattr(made, "dequantize", wrong)
    found = drifting.drift(folder)
    line = next(line for line in found if line.startswith("dequantize/w4-g32-asym/bf16/n10-k96/golden-0"))
    assert "expected/0/weight: 1 of 960 numbers differ, first [3, 5]" in line
    assert any(line.startswith("dequantize.safetensors: its bytes differ") for line in found)


def test_a_vector_that_is_gone_or_reworded_drifts(drifting, folder):
    drifting.write(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["vectors"][1]["comment"] = "another"
    del manifest["vectors"][0]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = drifting.drift(folder)
    assert f"{PACKING}: a new vector" in found or f"{SMALL[0]}: a new vector" in found
    assert any(line.endswith(": comment differs") for line in found)


def test_an_interrupted_writer_leaves_a_set_that_is_refused(drifting, folder, monkeypatch):
    drifting.write(folder)
    monkeypatch.setattr(made, "_REASONS", {**made._REASONS, "scale-shape": "another reason"})
    (folder / "packing.safetensors").unlink()
    with pytest.raises(VectorError, match=r"packing\.safetensors: No such file"):
        open_set(folder)


# ---- one error for whatever is wrong


def changed(change):
    """What to do to a folder, by a change of its manifest."""

    def apply(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return apply


def vector_of(manifest, vector_id):
    return next(v for v in manifest["vectors"] if v["id"] == vector_id)


def _truncate(name, keep):
    def apply(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return apply


def _text(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


def _at(path, value):
    """Set a field of a manifest; path: names and places, a vector by its id."""

    def change(manifest):
        found = manifest
        for step in path[:-1]:
            found = vector_of(manifest, step) if "/" in str(step) else found[step]
        found[path[-1]] = value

    return changed(change)


def _drop(path):
    def change(manifest):
        found = manifest
        for step in path[:-1]:
            found = vector_of(manifest, step) if "/" in str(step) else found[step]
        del found[path[-1]]

    return changed(change)


WRONG = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"manifest\.json: No such file"),
    "a manifest cut off": (_truncate("manifest.json", 0.5), r"manifest\.json: it is not strict JSON"),
    "no JSON": (_text("PK\x03\x04"), "not strict JSON"),
    "an array": (_text("[]"), r"schema: expected 'quantcts-vectors/1', found 'None'"),
    "nested without end": (_text("[" * 100_000 + "]" * 100_000), "nested too deeply"),
    "a number of a thousand digits": (_text('{"schema": ' + "9" * 1000 + "}"), "a number of 1000 digits"),
    "a number beyond double": (_text('{"schema": 1e999}'), "beyond double precision"),
    "NaN": (_text('{"schema": NaN}'), "NaN is no number of JSON"),
    "a name twice": (_text('{"schema": "a", "schema": "b"}'), "'schema' stands twice"),
    "another schema": (_at(["schema"], "quantcts-vectors/2"), "schema: expected 'quantcts-vectors/1'"),
    "no version": (_drop(["version"]), "the document: 'version' is a required property"),
    "a version of words": (_at(["version"], "latest"), "version: 'latest' does not match"),
    "a field too many": (_at([PACKING, "pickle"], "gASV"), r"vectors/\d+: .*'pickle' was unexpected"),
    "an unknown operation": (_at([PACKING, "operation"], "eval"), r"vectors/\d+/operation: 'eval' is not one of"),
    "a path for a file": (_at([PACKING, "file"], "../x.safetensors"), r"file: .*does not match"),
    "a file that is not listed": (_at([PACKING, "file"], "other.safetensors"), "file: 'other.safetensors' is not"),
    "a file of absurd size": (_at(["files", "packing.safetensors", "bytes"], 1 << 60), "bytes: .*than the maximum"),
    "a file that was cut off": (_truncate("packing.safetensors", 0.7), r"packing\.safetensors: it has \d+ bytes"),
    "an absent file": (lambda f: (f / "linear.safetensors").unlink(), r"linear\.safetensors: No such file"),
    "a stray file": (lambda f: (f / "more.safetensors").write_bytes(b""), "more.safetensors: manifest.json does not"),
    "another digest": (_at(["files", "packing.safetensors", "sha256"], "0" * 64), "its SHA-256 is"),
    "an id twice": (changed(lambda m: m["vectors"].append(m["vectors"][0])), "id: .* stands there twice"),
    "an unknown case": (_at([PACKING, "id"], "packing/w3/dim1/n10-k34/uniform-0"), "this suite has no such case"),
    "another case's id": (_at([PACKING, "id"], "packing/w5/dim1/n10-k33/uniform-0"), "format/bits: 3, the case has 5"),
    "clauses of another": (_at([PACKING, "clauses"], ["C1"]), "clauses: not those of the case"),
    "a flag that is not explained": (_at([PACKING, "flags"], ["novel"]), "flags: 'novel' is not explained"),
    "a tensor that is not there": (
        _at([PACKING, "inputs", "codes", "tensor"], "0" * 12), "inputs/codes: packing.safetensors has no tensor"
    ),
    "another shape": (_at([PACKING, "inputs", "codes", "shape"], [33, 10]), r"shape: \[33, 10\] here, \[10, 33\]"),
    "another dtype": (_at([PACKING, "inputs", "codes", "dtype"], "BOOL"), "inputs/codes/dtype: BOOL here, I8 in"),
    "a shape without end": (_at([PACKING, "inputs", "codes", "shape"], [1 << 62]), "shape/0: .*than the maximum"),
    "a negative shape": (_at([PACKING, "inputs", "codes", "shape"], [-1]), "shape/0: -1 is less than"),
    "a role that is missing": (_drop([LINEAR, "inputs", "x1"]), "no vector refers to it|the tensor 'x1' is missing"),
    "a role too many": (
        changed(lambda m: vector_of(m, LINEAR)["inputs"].update(bias=vector_of(m, LINEAR)["inputs"]["x0"])),
        r"inputs/bias: expected BF16 \[10\], found BF16 \[3, 96\]",
    ),
    "a tensor of nobody": (changed(lambda m: m["vectors"].pop()), "no vector refers to it"),
    "an unknown role": (
        changed(lambda m: vector_of(m, LINEAR)["inputs"].update(gain=vector_of(m, LINEAR)["inputs"]["x0"])),
        "inputs: 'gain' is no tensor of such a vector",
    ),
    "a contract that is not listed": (
        _at([LINEAR, "expected", 0, "alternatives", 0, "contracts"], ["lax"]), "contracts: 'lax' is not listed"
    ),
    "a contract with other promises": (
        _at(["contracts", "rounded", "partial_sums"], 64), "contracts/rounded: this suite knows no such promises"
    ),
    "a contract without meaning": (_at(["contracts", "rounded", "partial_sums"], 65), "greater than the maximum"),
    "too many alternatives": (
        changed(lambda m: vector_of(m, LINEAR)["expected"][0]["alternatives"].append(
            dict(vector_of(m, LINEAR)["expected"][0]["alternatives"][0]))),
        r"expected/0: tensors/(y|low|high|tips): expected",
    ),
    "good data called bad": (_at([PACKING, "result"], "invalid"), r"vectors/\d+: "),
    "nothing expected": (_at([PACKING, "expected"], []), "expected: .*(too short|non-empty)"),
    "a rank twice": (
        _at(["sharding/w2-channel-sym/ep2/e5-h50-i34-bias/uniform-0", "expected", 1, "rank"], 0), r"ranks are \[0, 0\]"
    ),
    "parameters without meaning": (
        _at([SMALL[5], "format", "activation", "kind"], "relu"), "format: activation: kind 'relu'|format/activation"
    ),
    "a field of the format too many": (_at([LINEAR, "format", "gain"], 2), "format/gain: no field of such a vector"),
    "no scale of a static format": (
        _at([SMALL[6], "format", "input_scale"], None), "format/input_scale: 'None' is no value of it"
    ),
    "sizes of the control": (
        _at([SMALL[4], "format", "control_sizes"], {"hidden": -1, "intermediate": 8}), "control_sizes: expected up to"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_clear_error(what, folder):
    spoil, message = WRONG[what]
    spoil(folder)
    with pytest.raises(VectorError, match=message) as caught:
        Stored(open_set(folder))
    said = str(caught.value)
    assert str(folder) in said
    assert "\n" not in said
    assert len(said) < 800
    assert caught.value.exit_code == ExitCode.BAD_ARGUMENT


def test_the_command_ends_with_the_error_and_judges_nothing(folder, quantcts):
    (folder / "manifest.json").write_text("[" * 100_000)
    done = quantcts("run", "--backend", "numpy", "--vectors", str(folder))
    assert done.code == 3
    assert "nested too deeply" in done.output
    assert "Traceback" not in done.output
    assert done.report is None


# ---- safetensors


def test_what_is_written_is_read_again():
    tensors = {"b": np.arange(6, dtype=np.int32).reshape(2, 3), "a": np.zeros((0, 4), np.int8)}
    content = encode(tensors)
    assert content == encode(dict(reversed(tensors.items())))
    found = decode(content, "x")
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in tensors.items()
    }
    assert int.from_bytes(content[:8], "little") % 8 == 0
    with pytest.raises(ValueError, match="read-only"):
        found["b"][0, 0] = 1


def with_header(header, data=b"", length=None):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="I32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes do not fit"),
        (b"\xff" * 8, "header length"),
        (with_header({}, length=1 << 60), "header length"),
        (with_header(b"\x80\x04\x95"), "not strict JSON"),
        (with_header([]), "expected an object"),
        (with_header({"a": 1}), "'a': expected dtype, shape and data_offsets"),
        (with_header({"a": entry("U64")}, b"\0" * 8), "dtype: str 'U64' is none of"),
        (with_header({"a": entry(["I32"])}, b"\0" * 8), "dtype: list"),
        (with_header({"a": entry(shape=(-2,))}, b"\0" * 8), "shape: expected up to 8 sizes"),
        (with_header({"a": entry(shape=(True, 2))}, b"\0" * 8), "shape: expected"),
        (with_header({"a": entry(shape=(1 << 62,))}, b"\0" * 8), "shape: expected"),
        (with_header({"a": entry(shape=(1 << 25, 1 << 25))}, b"\0" * 8), "takes 4503599627370496 bytes"),
        (with_header({"a": entry(shape=[1] * 9)}, b"\0" * 8), "shape: expected"),
        (with_header({"a": entry(offsets=(0, 1 << 62))}, b"\0" * 8), "data_offsets: expected two places"),
        (with_header({"a": entry(offsets=(8, 0))}, b"\0" * 8), "it begins at 8"),
        (with_header({"a": entry(), "b": entry()}, b"\0" * 8), "it begins at 0, the one before it ends at 8"),
        (with_header({"a": entry()}, b"\0" * 7), r"data_offsets are 0\.\.8 of 7"),
        (with_header({"a": entry()}, b"\0" * 9), "end at byte 8 of 9"),
        (with_header({"a": entry("BOOL", (8,))}, b"\x02" * 8), "neither 0 nor 1"),
        (with_header(b'{"a": 1, "a": 2}'), "stands twice"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_safetensors_file_is_refused(content, message):
    with pytest.raises(VectorError, match=message):
        decode(content, "x.safetensors")


# ---- fuzzed, for a bounded time

FUZZ = settings(max_examples=80, deadline=None, derandomize=True, database=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(document, path=()):
    """Every place of a document."""
    if path:
        yield path
    steps = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document if isinstance(document, list) else ())
    )
    for step, inner in steps:
        yield from places(inner, (*path, step))


def outcome(folder, files):
    """`refused`, or the vectors of the set: anything else that is raised fails the test."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        found = Stored(open_set(folder))
        for case in found.cases.values():
            asked = getattr(found, case.operation)(case)
            if hasattr(asked, "goal") and found.set.vectors[case.id].valid:
                from reference.bounds import Contract

                asked.goal(Contract(weights="rounded", intermediates="fp32"))
    except RunError:
        return "refused"
    return set(found.set.vectors)


def with_digests(files):
    """The files, with a manifest that agrees with them."""
    manifest = json.loads(files["manifest.json"])
    for name, entry in manifest["files"].items():
        entry |= {"sha256": hashlib.sha256(files[name]).hexdigest(), "bytes": len(files[name])}
    return {**files, "manifest.json": json.dumps(manifest).encode()}


@pytest.fixture(scope="module")
def fuzzed(contents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    assert outcome(folder, contents) == set(SMALL)
    return folder


@FUZZ
@given(data=st.data())
def test_a_manifest_with_anything_in_one_place(data, fuzzed, contents):
    manifest = json.loads(contents["manifest.json"])
    every = list(places(manifest))
    path = data.draw(st.sampled_from(every))
    found = manifest
    for step in path[:-1]:
        found = found[step]
    if data.draw(st.booleans()):
        found[path[-1]] = data.draw(JSON)
    else:
        del found[path[-1]]
    text = json.dumps(manifest)
    said = outcome(fuzzed, {**contents, "manifest.json": text.encode()})
    assert said == "refused" or len(said) >= len(SMALL) - 1  # words may change, and tensors are shared


@FUZZ
@given(data=st.data())
def test_a_manifest_with_other_bytes(data, fuzzed, contents):
    content = bytearray(contents["manifest.json"])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    outcome(fuzzed, {**contents, "manifest.json": bytes(content)})


@FUZZ
@given(data=st.data())
def test_a_file_with_other_bytes_is_refused_by_its_digest_and_by_its_form(data, fuzzed, contents):
    name = data.draw(st.sampled_from([n for n in contents if n.endswith(".safetensors")]))
    content = bytearray(contents[name])
    length = int.from_bytes(content[:8], "little")
    place = data.draw(st.integers(0, 8 + length))
    content[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    if bytes(content) == contents[name]:
        return
    assert outcome(fuzzed, {**contents, name: bytes(content)}) == "refused"
    outcome(fuzzed, with_digests({**contents, name: bytes(content)}))
    try:
        found = decode(bytes(content), name)
    except VectorError:
        return
    assert found  # another name, or numbers that are data


@FUZZ
@given(content=st.binary(max_size=200) | JSON.map(lambda d: with_header(json.dumps(d).encode(), b"\0" * 16)))
def test_any_bytes_at_all(content):
    with contextlib.suppress(VectorError):
        decode(content, "x")


def test_a_copy_elsewhere_is_the_same_set(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert open_set(tmp_path / "elsewhere").digest == open_set(folder).digest
