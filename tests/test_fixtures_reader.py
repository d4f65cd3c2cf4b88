"""The golden vectors' reader in C++: right on all of them, red where a vector or its kernel is changed, and one clear
line for files that are not as they should be. Built as fixtures/README.md says, with sanitizers."""

import hashlib
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from conformance.vectors.document import text_of
from conformance.vectors.tensors import decode, dtype_name, encode

FIXTURES = ROOT / "fixtures"
SOURCE = FIXTURES / "reader.cpp"
README = (FIXTURES / "README.md").read_text("utf-8")
MANIFEST = json.loads((FIXTURES / "manifest.json").read_text("utf-8"))
JUDGED = ("packing", "layouts", "dequantize", "linear", "validation")
PACKING = "packing/w3/dim1/n10-k33/uniform-0"
DEQUANTIZE = "dequantize/w4-g32-asym/bf16/n10-k96/golden-0"
EXACT = "linear/w2-g32-sym/a16/bf16/m7-n33-k32/integers-0"
BOUNDED = "linear/w4-g32-sym/a-int8/bf16/m3-n10-k96/golden-0"
LAYOUT = "layouts/gptq-v1/w4-g32-asym/n32-k64"
INVALID = "validation/w3-g32-asym/bf16/scale-shape"
SMALL = (PACKING, DEQUANTIZE, EXACT, BOUNDED, LAYOUT, INVALID)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(source, reader, *options):
    """With the command of the README, its -O2 replaced by the options."""
    (line,) = re.findall(r"^g\+\+ .*reader\.cpp.*$", README, re.M)
    words = shlex.split(line.split("&&")[0])
    words[words.index("-o") + 1] = str(reader)
    words[words.index("fixtures/reader.cpp")] = str(source)
    words.remove("-O2")
    subprocess.run([*words, *options, "-Wall", "-Wextra", "-Werror"], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "reader"
    build(SOURCE, path, *SANITIZED)
    return path


def read(reader, *arguments, **env):
    command = [str(reader), *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **env}, timeout=120
    )


# ---- all vectors


@pytest.mark.parametrize("contract", ["default", "compressed-tensors"])
def test_it_agrees_with_every_vector(reader, contract):
    """With the sanitizers; `nox -s fixtures-reader` asks every contract."""
    done = read(reader, FIXTURES, "--contract", contract)
    assert (done.returncode, done.stderr) == (0, "")
    count = {name: sum(v["operation"] == name for v in MANIFEST["vectors"]) for name in JUDGED}
    expected = [f"{name}: {n} vectors, {n} right, 0 failed" for name, n in count.items()]
    assert done.stdout.splitlines() == expected
    assert done.stdout in README


# ---- a small set that can be changed


class Set:
    """Vectors by their ids, in a folder of their own."""

    def __init__(self, folder: Path, ids=SMALL) -> None:
        self.folder = folder
        self.document = {**MANIFEST, "vectors": [v for v in MANIFEST["vectors"] if v["id"] in ids]}
        self.document = json.loads(json.dumps(self.document))  # a copy that may be changed
        assert {v["id"] for v in self.document["vectors"]} == set(ids)
        self.files = {}
        for name in sorted({v["file"] for v in self.document["vectors"]}):
            wanted = {ref["tensor"] for v in self.document["vectors"] if v["file"] == name for ref in refs(v)}
            tensors = decode((FIXTURES / name).read_bytes(), name)
            self.files[name] = {n: a.copy() for n, a in tensors.items() if n in wanted}
        self.contents = {name: encode(tensors) for name, tensors in self.files.items()}

    def vector(self, vector_id):
        return next(v for v in self.document["vectors"] if v["id"] == vector_id)

    def tensor(self, vector_id, role, where="inputs"):
        vector = self.vector(vector_id)
        roles = vector["expected"][0]["tensors"] if where == "expected" else vector[where]
        return self.files[vector["file"]][roles[role]["tensor"]]

    def encode(self):
        """From the tensors that vectors still refer to."""
        used = {(v["file"], ref["tensor"]) for v in self.document["vectors"] for ref in refs(v)}
        self.files = {f: {n: a for n, a in t.items() if (f, n) in used} for f, t in self.files.items()}
        self.contents = {name: encode(tensors) for name, tensors in self.files.items()}

    def replace(self, roles, role, array):
        """Another tensor of linear.safetensors for a role, said alike in manifest and file."""
        name = f"{len(self.files['linear.safetensors']):012d}"
        self.files["linear.safetensors"][name] = array
        roles[role] = {"tensor": name, "dtype": dtype_name(array), "shape": list(array.shape)}
        self.encode()

    def write(self):
        """Files with the sizes and digests that the manifest says."""
        self.document["files"] = {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in self.contents.items()
        }
        for name, content in self.contents.items():
            (self.folder / name).write_bytes(content)
        (self.folder / "manifest.json").write_bytes(text_of(self.document))
        return self.folder


def refs(vector):
    parts = [vector["inputs"], vector.get("control", {}), *(e["tensors"] for e in vector.get("expected", []))]
    return [ref for part in parts for ref in part.values()]


@pytest.fixture
def small(tmp_path):
    return Set(tmp_path)


def test_the_small_set_is_sound(reader, small):
    done = read(reader, small.write())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[3] == "linear: 2 vectors, 2 right, 0 failed"


def _flip(small, vector_id, role, where, place=0, bit=0):
    small.tensor(vector_id, role, where).reshape(-1).view(np.uint8)[place] ^= 1 << bit


@pytest.mark.parametrize(
    ("vector_id", "role", "where", "bit"),
    [
        (PACKING, "words", "expected", 0),
        (PACKING, "codes", "inputs", 0),
        (LAYOUT, "qzeros", "expected", 4),
        (LAYOUT, "scales", "expected", 0),
        (LAYOUT, "codes", "inputs", 1),
        (DEQUANTIZE, "weight", "expected", 0),
        (DEQUANTIZE, "weight_packed", "inputs", 0),
        (DEQUANTIZE, "weight_zero_point", "inputs", 0),
        (EXACT, "y", "expected", 0),
        (EXACT, "weight_packed", "inputs", 0),
        (BOUNDED, "weight_packed", "inputs", 3),
    ],
)
def test_a_mutated_vector_fails_by_its_id(reader, small, vector_id, role, where, bit):
    _flip(small, vector_id, role, where, bit=bit)
    small.encode()
    done = read(reader, small.write())
    assert done.returncode == 1, done.stderr
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert re.match(rf"FAILED {re.escape(vector_id)}: \w+ \[[0-9, ]+\]: got \S+, expected ", failed)


def test_ends_that_exclude_the_answer_fail(reader, small):
    y, low, high = (small.tensor(BOUNDED, role, "expected") for role in ("y", "low", "high"))
    for end in (y, low, high):  # all of them one ulp away from zero
        end.view(np.uint16)[...] += 1
    small.encode()
    done = read(reader, small.write(), "--id", BOUNDED)
    assert done.returncode == 1
    assert f"FAILED {BOUNDED}: y [" in done.stdout
    assert "are wrong under" in done.stdout


def test_an_invalid_vector_that_is_not_fails(reader, small):
    vector = small.vector(INVALID)
    vector["inputs"] = vector["control"]
    small.encode()
    done = read(reader, small.write())
    assert done.returncode == 1
    assert f"FAILED {INVALID}: inputs: got an answer, expected a refusal: {vector['reason']}" in done.stdout


def test_a_control_that_is_bad_fails(reader, small):
    small.tensor(INVALID, "weight_scale", "control")[0] = np.nan
    small.encode()
    done = read(reader, small.write())
    assert done.returncode == 1
    assert f"FAILED {INVALID}: refused: weight_scale: a scale is not finite" in done.stdout


# ---- what is malformed


def _header(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _change_header(change):
    def apply(small):
        header, data = _header(small.contents["linear.safetensors"])
        change(header)
        small.contents["linear.safetensors"] = _with_header(header, data)

    return apply


def _first(header, key, value):
    next(iter(header.values()))[key] = value


def _change_content(change):
    def apply(small):
        small.contents["linear.safetensors"] = change(small.contents["linear.safetensors"])

    return apply


def _change(vector_id, change):
    def apply(small):
        change(small.vector(vector_id))
        small.encode()

    return apply


def _replace(role, change, where="inputs"):
    def apply(small):
        vector = small.vector(BOUNDED)
        roles = vector["expected"][0]["tensors"] if where == "expected" else vector[where]
        small.replace(roles, role, change(small.files[vector["file"]][roles[role]["tensor"]]))

    return apply


def _drop(operation):
    def apply(small):
        small.document["vectors"] = [v for v in small.document["vectors"] if v["operation"] != operation]
        small.encode()

    return apply


def _set_number(name, value):
    def apply(small):
        small.vector(BOUNDED)["format"][name] = value

    return apply


def _not_between(small):
    _flip(small, BOUNDED, "low", "expected", place=1, bit=7)  # its sign
    small.encode()


MALFORMED = {
    "file cut off": (_change_content(lambda c: c[:-1]), "linear.safetensors"),
    "file of four bytes": (_change_content(lambda c: c[:4]), "bytes"),
    "file of eight bytes": (_change_content(lambda c: c[:8]), "header length"),
    "more behind the tensors": (_change_content(lambda c: c + b"\0"), "more behind them"),
    "header beyond the file": (_change_content(lambda c: b"\xff" * 8 + c[8:]), "header length"),
    "header a byte beyond the file": (
        _change_content(lambda c: struct.pack("<Q", len(c) - 7) + c[8:]), "header length",
    ),
    "header no JSON": (_change_content(lambda c: _with_header(b"{]", b"")), "no strict JSON"),
    "header no object": (_change_content(lambda c: _with_header(b"[]", b"")), "expected an object"),
    "header nested": (_change_content(lambda c: _with_header(b"[" * 1_000_000, b"")), "nested"),
    "header name twice": (
        _change_content(lambda c: _with_header(b'{"a":1,"a":1}', b"")), "'a' stands twice",
    ),
    "shape of another size": (_change_header(lambda h: _first(h, "shape", [1])), "data_offsets"),
    "shape negative": (_change_header(lambda h: _first(h, "shape", [-1])), "/shape/0: -1"),
    "shape huge": (_change_header(lambda h: _first(h, "shape", [10**17])), "/shape/0"),
    "shape whose product overflows": (
        _change_header(lambda h: _first(h, "shape", [1 << 26] * 8)), "more than 67108864 elements",
    ),
    "shape of nine dimensions": (_change_header(lambda h: _first(h, "shape", [1] * 9)), "9 entries"),
    "shape no list": (_change_header(lambda h: _first(h, "shape", "7")), "expected a list"),
    "size a fraction": (_change_header(lambda h: _first(h, "shape", [1.5])), "expected an integer"),
    "dtype unknown": (_change_header(lambda h: _first(h, "dtype", "F64")), "'F64' is no dtype"),
    "offsets exchanged": (_change_header(lambda h: _first(h, "data_offsets", [8, 0])), "data_offsets"),
    "offsets huge": (_change_header(lambda h: _first(h, "data_offsets", [0, 10**17])), "data_offsets/1"),
    "offsets three": (_change_header(lambda h: _first(h, "data_offsets", [0, 1, 2])), "3 entries"),
    "offsets missing": (_change_header(lambda h: next(iter(h.values())).pop("data_offsets")), "is missing"),
    "tensor missing": (_change_header(lambda h: h.pop(list(h)[-1])), "it is cut off or has more"),
    "tensors overlap": (
        _change_header(lambda h: h.update(more={"dtype": "I8", "shape": [1], "data_offsets": [0, 1]})),
        "data_offsets: it begins at 0",
    ),
    "tensor of nobody": (
        _change_header(lambda h: h.update(more={"dtype": "I8", "shape": [0], "data_offsets": [0, 0]})),
        "no vector refers to more",
    ),
    "reference to no tensor": (
        _change(BOUNDED, lambda v: v["inputs"]["x0"].update(tensor="no")), "has no tensor 'no'",
    ),
    "reference of another shape": (
        _change(BOUNDED, lambda v: v["inputs"]["x0"].update(shape=[96, 3])), "inputs/x0: BF16 [96, 3] here",
    ),
    "reference of another dtype": (
        _change(BOUNDED, lambda v: v["inputs"]["x0"].update(dtype="F16")), "inputs/x0: F16",
    ),
    "role missing": (
        _change(BOUNDED, lambda v: v["inputs"].pop("x1")), f"{BOUNDED}: the tensor 'x1' is missing",
    ),
    "role unknown": (
        _change(BOUNDED, lambda v: v["inputs"].update(x2=v["inputs"]["x0"])), "'x2' is no tensor of such",
    ),
    "words short": (_replace("weight_packed", lambda a: a[:, :-1].copy()), "weight_packed: expected I32 [10, 12]"),
    "scales transposed": (_replace("weight_scale", lambda a: a.T.copy()), "weight_scale: expected BF16 [10, 3]"),
    "scales of another dtype": (_replace("weight_scale", lambda a: a.astype(np.float32)), "found F32 [10, 3]"),
    "words of another dtype": (
        _replace("weight_packed", lambda a: a.astype(np.float32)), "expected I32 [10, 12], found F32",
    ),
    "alternatives missing": (_replace("y", lambda a: a[:1].copy(), "expected"), "y: expected BF16 [6, 6, 10]"),
    "no high": (_change(BOUNDED, lambda v: v["expected"][0]["tensors"].pop("high")), "low, high and tips"),
    "y not between": (_not_between, f"{BOUNDED}: y [0, 0, 0]: not between low and high"),
    "sizes of the format": (_set_number("n", 11), "y: expected BF16 [6, 6, 11]"),
    "size huge": (_set_number("k", 10**17), f"{BOUNDED}/format/k"),
    "size beyond 63 bits": (_set_number("k", 10**30), "an integer of 31 digits"),
    "m a string": (_set_number("m", "3"), "format/m: expected an integer, found a string"),
    "dtype of the format": (_set_number("dtype", "fp64"), "'fp64' is neither"),
    "layout unknown": (_set_number("layout", "dense\n"), "does not know 'dense?'"),
    "activations unknown": (
        _change(BOUNDED, lambda v: v["format"]["input_activations"].update(num_bits=7)), "'int7' is none of",
    ),
    "width 0": (_change(BOUNDED, lambda v: v["format"]["weights"].update(num_bits=0)), "num_bits: 0 is not in"),
    "width 31": (_change(PACKING, lambda v: v["format"].update(bits=31)), "bits: 31 is not in 1 to 8"),
    "axis": (_change(PACKING, lambda v: v["format"].update(axis=-3)), "axis: -3"),
    "group of 0": (
        _change(BOUNDED, lambda v: v["format"]["weights"].update(group_size=0)), "group_size: 0 is not in",
    ),
    "result changed": (
        _change(PACKING, lambda v: v.update(result="invalid")), "valid vectors have expected",
    ),
    "operation unknown": (_change(PACKING, lambda v: v.update(operation="packng")), "'packng' is none"),
    "field unknown": (_change(PACKING, lambda v: v.update(more=1)), "'more' is no field"),
    "field missing": (_change(PACKING, lambda v: v.pop("comment")), "'comment' is missing"),
    "flag unknown": (_change(PACKING, lambda v: v["flags"].append("no-such")), "'no-such' is not explained"),
    "file unknown": (_change(PACKING, lambda v: v.update(file="no.safetensors")), "is not listed under files"),
    "contract unknown": (
        _change(BOUNDED, lambda v: v["expected"][0]["alternatives"][0].update(contracts=["no"])),
        "'no' is not listed under contracts",
    ),
    "nothing legal": (
        _change(BOUNDED, lambda v: [a.update(contracts=[]) for a in v["expected"][0]["alternatives"]]),
        "no alternative is legal under the contract default",
    ),
    "id twice": (
        lambda s: s.document["vectors"].append(s.vector(PACKING)), f"{PACKING}: id: it stands there twice",
    ),
    "id of other letters": (_change(PACKING, lambda v: v.update(id="a\x1b[2J")), "'a?[2J' is no id"),
    "no packing": (_drop("packing"), "there is none of packing"),
    "no linear": (_drop("linear"), "there is none of linear"),
    "no vectors": (lambda s: s.document.update(vectors=[]), "vectors: 0 entries"),
    "schema of tomorrow": (lambda s: s.document.update(schema="quantcts-vectors/2"), "quantcts-vectors/2"),
}  # fmt: skip


def _refused(reader, folder, said, *arguments):
    done = read(reader, folder, *arguments)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"reader: {folder}/")
    assert said in line


@pytest.mark.slow
@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_one_line(reader, small, name):
    change, said = MALFORMED[name]
    change(small)
    _refused(reader, small.write(), said)


def _text(change):
    return lambda text: change(text.decode()).encode()


MANIFESTS = {
    "empty": (lambda text: b" ", "no strict JSON at byte 1: expected a value"),
    "cut off": (lambda text: text[:-20], "no strict JSON"),
    "no object": (lambda text: b"[]", "expected an object, found a list"),
    "two documents": (lambda text: text + b"{}", "something follows"),
    "nested": (lambda text: b'{"schema":' * 100_000, "nested more than 32 deep"),
    "nested lists": (lambda text: b"[" * 10_000_000, "nested more than 32 deep"),
    "many values": (lambda text: b"[" + b"0," * 3_000_000 + b"0]", "more than 2097152 values"),
    "name twice": (_text(lambda t: t.replace("{", '{"schema": 1, "schema": 1,', 1)), "'schema' stands twice"),
    "NaN": (_text(lambda t: t.replace('"axis":-1', '"axis":NaN')), "expected a value"),
    "1e999": (_text(lambda t: t.replace('"axis":-1', '"axis":1e999')), "beyond double precision"),
    "leading zero": (_text(lambda t: t.replace('"axis":-1', '"axis":-01')), "begins with 0"),
    "long integer": (_text(lambda t: t.replace('"axis":-1', '"axis":' + "9" * 10**6)), "1000000 digits"),
    "control character": (_text(lambda t: t.replace('"comment":"', '"comment":"\n')), "control character"),
    "half a surrogate": (_text(lambda t: t.replace('"comment":"', '"comment":"\\ud800')), "surrogate"),
    "unknown escape": (_text(lambda t: t.replace('"comment":"', '"comment":"\\x')), "unknown escape"),
    "string without end": (lambda text: b'{"schema', "a string without end"),
    "zero byte": (lambda text: b"\0" + text, "no strict JSON at byte 0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_one_line(reader, small, name):
    change, said = MANIFESTS[name]
    folder = small.write()
    (folder / "manifest.json").write_bytes(change(text_of(small.document)))
    _refused(reader, folder, said)


def test_a_file_that_is_not_the_manifests_is_told_by_its_digest(reader, small):
    folder = small.write()
    content = bytearray((folder / "linear.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "linear.safetensors").write_bytes(content)
    found = hashlib.sha256(content).hexdigest()
    _refused(reader, folder, f"linear.safetensors: its SHA-256 is {found}")


def test_missing_files_are_told(reader, small):
    folder = small.write()
    (folder / "linear.safetensors").unlink()
    _refused(reader, folder, "linear.safetensors: No such file", "--operation", "packing")
    (folder / "manifest.json").unlink()
    _refused(reader, folder, "manifest.json: No such file")
    (folder / "manifest.json").mkdir()
    _refused(reader, folder, "manifest.json: Is a directory")


def test_names_of_files_do_not_leave_the_folder(reader, small):
    folder = small.write()
    text = text_of(small.document).replace(b'"packing.safetensors"', b'"../packing.safetensors"')
    (folder / "manifest.json").write_bytes(text)
    _refused(reader, folder, "it is no name of a file")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_never_a_crash(reader, small, seed):
    """Bytes changed anywhere, digests made to fit: a verdict, or one line."""
    random = np.random.default_rng(seed)
    small.write()
    name = ["manifest.json", *small.contents][seed % (1 + len(small.contents))]
    content = bytearray((small.folder / name).read_bytes())
    reach = len(content) if name == "manifest.json" else 8 + int.from_bytes(content[:8], "little")
    for _ in range(random.integers(1, 4)):
        content[random.integers(reach)] = random.choice([random.integers(256), *b'"{}[],:-0919'])
    if name == "manifest.json":
        (small.folder / name).write_bytes(content)
    else:
        small.contents[name] = bytes(content)
        small.write()
    done = read(reader, small.folder)
    assert done.returncode in (0, 1, 2, 3), done.stderr
    assert len(done.stderr.splitlines()) == (done.returncode == 3) + 2 * (done.returncode == 2)


# ---- which vectors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--operation", "packing"), ["packing: 1 vectors"]),
        (("--operation", "packing", "--operation", "linear"), ["packing: 1 vectors", "linear: 2 vectors"]),
        (("--id", "linear/*/golden-?"), ["linear: 1 vectors"]),
        (("--id", "-g32-asym"), ["layouts: 1 vectors", "dequantize: 1 vectors", "validation: 1 vectors"]),
        (("--id", PACKING, "--id", "*scale-shape"), ["packing: 1 vectors", "validation: 1 vectors"]),
    ],
)
def test_vectors_are_chosen(reader, small, arguments, said):
    done = read(reader, small.write(), *arguments)
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--operation", "moe"), "this reader judges no operation moe"),
        (("--operation",), "--operation needs a value"),
        (("--id", "golden-?"), "no vector has such an id"),
        (("--operation", "packing", "--id", "linear/"), "no vector has such an id"),
        (("--contract", "promise"), "the manifest has no contract promise"),
        (("--verbose",), "there is no option --verbose"),
        (("another",), "two folders"),
    ],
)
def test_bad_usage_is_told(reader, small, arguments, said):
    done = read(reader, small.write(), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "usage: reader" in done.stderr


# ---- broken kernels


def _instead(old, new, within="OLD"):
    return within.replace("OLD", old), within.replace("OLD", f"({{on}} ? ({new}) : ({old}))")


def _before(old, new):
    return old, f"if ({{on}}) {new}\n{old}"


_CODE = "layer.codes[row * layer.k + column]"
_ZERO, _SCALE = "layer.zero_points[place]", "layer.scales[place]"
_FORMAT = "layer.format.dtype.format"
_PRODUCT = f"return ({_CODE} - {_ZERO}) * {_SCALE};"
_W4 = "n10-k96/golden-0"
INT4 = "linear/w4-channel-sym/a-int4/bf16/m3-n10-k67-bias/golden-0"
BIASED = "linear/w5-channel-sym/a16/bf16/m3-n10-k67-bias/golden-0"

# Name: edits of reader.cpp (what stands there once, what comes in its place, {on}: whether the fault is asked for),
# options, and a vector that has to fail.
FAULTS = {
    "words floored": (
        [
            _instead("(codes * bits + 31) / 32", "codes * bits / 32", "codes, int bits) { return OLD"),
            _before("const uint64_t pair =", "if (bit / 32 >= words) continue;"),
            ("if (pair >> 32) word", "if (pair >> 32 && !({on} && bit / 32 + 1 >= words)) word"),
        ],
        ("--operation", "packing"), "packing/w3/dim1/n10-k33/uniform-0",
    ),
    "high bits of straddling codes dropped": (
        [("if (bit % 32 + bits > 32)", "if (!{on} && bit % 32 + bits > 32)")],
        ("--operation", "packing"), "packing/w5/dim1/n10-k33/onehot-0",
    ),
    "packed without offset": (
        [_instead("static_cast<uint64_t>(code + offset)", "static_cast<uint64_t>(code & (2 * offset - 1))")],
        ("--operation", "packing"), "packing/w4/dim1/n10-k33/extremes-0",
    ),
    "codes of any size packed": (
        [_before("if (code < -offset || code >= offset)", "if (code < -offset || code >= offset) continue;")],
        ("--operation", "validation"), "validation/w4-g32-asym/bf16/code-range",
    ),
    "columns taken for rows": (
        [("found.lines.outer *= shape[i]", "({on} ? found.lines.inner : found.lines.outer) *= shape[i]")],
        ("--operation", "packing"), "packing/w3/dim1/n10-k33/uniform-0",
    ),
    "gptq-v1 read as v2": (
        [_instead("layout == Layout::gptq_v1 ? 1 : 0", "0", "moved(zeros, OLD)")],
        ("--operation", "layouts"), "layouts/gptq-v1/w4-g32-asym/n32-k64",
    ),
    "awq in the order of columns": (
        [_instead("awq_column[i % 8]", "i % 8", "to[i] = codes[i / 8 * 8 + OLD]")],
        ("--operation", "layouts"), "layouts/awq-gemm/w4-g32-asym/n32-k64",
    ),
    "zero point ignored": (
        [_before(_PRODUCT, f"return {_CODE} * {_SCALE};")],
        ("--operation", "dequantize"), f"dequantize/w4-g32-asym/bf16/{_W4}",
    ),
    "zero point scaled and rounded": (
        [_before(_PRODUCT, f"return {_CODE} * {_SCALE} - round_to({_ZERO} * {_SCALE}, {_FORMAT});")],
        ("--operation", "dequantize"), "dequantize/w8-g128-asym/bf16/n10-k256/golden-0",
    ),
    "groups taken for channels": (
        [_instead("column / format.group_size", "0", "format.group_size == 0 ? 0 : OLD")],
        ("--operation", "dequantize"), f"dequantize/w4-g32-sym/bf16/{_W4}",
    ),
    "order of activations ignored": (
        [("if (from.g_idx) {", "if (from.g_idx && !{on}) {")],
        ("--operation", "dequantize"), "dequantize/w4-g128-sym-gidx/bf16/n10-k256/golden-0",
    ),
    "ties away from zero": (
        [_instead("std::nearbyint(std::ldexp(value, -step))", "std::round(std::ldexp(value, -step))")],
        ("--operation", "dequantize"), f"dequantize/w8-g32-sym/bf16/{_W4}",
    ),
    "rounded toward zero": (
        [_instead("weight_of(layer, row, column)", "weight_of(layer, row, column) * 0.9999", "dtype.bits(OLD)")],
        ("--operation", "dequantize"), f"dequantize/w4-g32-sym/bf16/{_W4}",
    ),
    "bias forgotten": (
        [("= bias.empty() ?", "= bias.empty() || {on} ?")],
        ("--operation", "linear"), BIASED,
    ),
    "bias after the rounding": (
        [_instead("sum * token.scale + added", "round_to(sum * token.scale, dtype.format) + added")],
        ("--operation", "linear"), BIASED,
    ),
    "weights rounded, or not, against the promise": (
        [("promise.rounded_weights ?", "(promise.rounded_weights != {on}) ?")],
        ("--operation", "linear", "--contract", "exact-16"), BIASED,
    ),
    "activations not quantized": (
        [("if (kind == Activations::sixteen_bit)", "if (kind == Activations::sixteen_bit || {on})")],
        ("--operation", "linear"), BOUNDED,
    ),
    "half the range in the kernel convention": (
        [_instead("fp32(amax / highest)", "fp32(amax / (highest + 0.5))")],
        ("--operation", "linear"), BOUNDED,
    ),
    "int8 for int4": (
        [("kind == Activations::int4 ? 7", "kind == Activations::int4 ? ({on} ? 127 : 7)")],
        ("--operation", "linear"), INT4,
    ),
    "fp8 codes rounded to integers": (
        [("kind == Activations::fp8 ?", "kind == Activations::fp8 && !{on} ?")],
        ("--operation", "linear"), "linear/w4-g32-sym/a-fp8/bf16/m3-n10-k96/golden-0",
    ),
    "codes truncated": (
        [_instead("std::nearbyint(quotient)", "std::trunc(quotient)")],
        ("--operation", "linear"), BOUNDED,
    ),
    "the other convention": (
        [("if (promise.compressed_tensors) {", "if (promise.compressed_tensors != {on}) {")],
        ("--operation", "linear", "--contract", "compressed-tensors"), BOUNDED,
    ),
    "the first answer twice": (
        [('{"x0", "x1"}', '{"x0", {on} ? "x0" : "x1"}')],
        ("--operation", "linear"), BOUNDED,
    ),
    "always the lowest that is allowed": (
        [_instead("compare_bounded(bounds, got)", "compare_bounded(bounds, bounds[0].low)")],
        ("--operation", "linear"), "linear/w3-channel-sym/a-int8/bf16/m3-n10-k67/golden-0",
    ),
    "words not counted": (
        [
            ("refuse_unless(from.packed.shape ==", "refuse_unless({on} || from.packed.shape =="),
            _instead("unpack(from.packed.values, {n, k, 1}, format.bits)", "std::vector<int>(n * k)"),
        ],
        ("--operation", "validation"), "validation/w4-g32-asym/bf16/word-count",
    ),
    "words of zero points not counted": (
        [
            ("refuse_unless(from.zeros->shape ==", "refuse_unless({on} || from.zeros->shape =="),
            _instead("unpack(from.zeros->values, {1, n, groups}, format.bits)", "std::vector<int>(n * groups)"),
        ],
        ("--operation", "validation"), "validation/w4-g32-asym/bf16/zero-words",
    ),
    "scales not counted": (
        [("refuse_unless(from.scale.shape ==", "refuse_unless({on} || from.scale.shape ==")],
        ("--operation", "validation"), "validation/w4-g32-asym/bf16/scale-shape",
    ),
    "groups that do not divide K": (
        [("k % format.group_size == 0,", "({on} || k % format.group_size == 0),")],
        (), "",  # see test_groups_that_do_not_divide_k
    ),
    "scales of NaN": (
        [("std::isfinite(layer.scales.back())", "({on} || std::isfinite(layer.scales.back()))")],
        ("--operation", "validation"), "validation/w4-g32-asym/bf16/scale-nan",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def breakable(tmp_path_factory):
    """A copy of the reader that has the fault that FAULT names."""
    folder = tmp_path_factory.mktemp("breakable")
    text = SOURCE.read_text("utf-8")
    for name, (edits, _, _) in FAULTS.items():
        on = f'[] {{ static const bool on = fault("{name}"); return on; }}()'
        for old, new in edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new.replace("{on}", on))
    start = "\nusing Shape ="
    fault = '\nbool fault(const char* n) { const char* f = std::getenv("FAULT"); return f && !std::strcmp(f, n); }\n'
    assert text.count(start) == 1
    (folder / "reader.cpp").write_text(text.replace(start, fault + start))
    build(folder / "reader.cpp", folder / "reader", "-O1")
    return folder / "reader"


@pytest.mark.slow
def test_the_breakable_kernel_is_right_as_long_as_nothing_is_broken(breakable):
    assert read(breakable, FIXTURES).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, _, vector_id) in FAULTS.items() if vector_id])
def test_a_broken_kernel_fails(breakable, name):
    _, options, vector_id = FAULTS[name]
    done = read(breakable, FIXTURES, *options, FAULT=name)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"FAILED {vector_id}: " in done.stdout


@pytest.mark.slow
def test_the_failure_that_the_readme_shows_is_a_real_one(breakable):
    (line,) = re.findall(r"^FAILED .*$", README, re.M)
    done = read(breakable, FIXTURES, "--operation", "packing", FAULT="high bits of straddling codes dropped")
    assert done.stdout.splitlines()[0] == line


@pytest.mark.slow
@pytest.mark.parametrize("contract", MANIFEST["contracts"])
def test_what_is_right_depends_on_the_promise(breakable, contract):
    """Under the default a kernel may round its weights or not; who promises one must not do the other."""
    fault = "weights rounded, or not, against the promise"
    options = ("--operation", "linear", "--contract", contract)
    assert read(breakable, FIXTURES, *options, FAULT=fault).returncode == (contract != "default")
    assert read(breakable, FIXTURES, *options, FAULT="the other convention").returncode == 1


@pytest.mark.slow
def test_groups_that_do_not_divide_k(breakable, tmp_path):
    """A vector whose scales are as many as K / group_size rounded down: nothing else is wrong with it."""
    remainder = "validation/w3-g32-asym/bf16/group-remainder"
    small = Set(tmp_path, (*SMALL, remainder))
    roles = small.vector(remainder)["inputs"]
    for role in ("weight_scale", "weight_zero_point"):
        small.replace(roles, role, small.tensor(remainder, role)[:, :1].copy())
    small.write()
    assert read(breakable, tmp_path).returncode == 0
    done = read(breakable, tmp_path, FAULT="groups that do not divide K")
    assert f"FAILED {remainder}: inputs: got an answer" in done.stdout
