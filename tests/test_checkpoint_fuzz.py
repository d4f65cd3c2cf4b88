"""Checkpoint folders with anything in one place: problems and an exit code, never a crash."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import Draft
from test_vector_files import JSON, places

from conformance.checkpoint.check import check_checkpoint
from conformance.errors import RunError
from conformance.exitcodes import ExitCode

FUZZ = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SOUND = ExitCode.AS_EXPECTED


def outcome(folder):
    """The exit code, or `refused`: anything else that is raised fails the test."""
    said = io.StringIO()
    try:
        return check_checkpoint(folder, None, "numpy", None, ["quantcts"], said)
    except RunError:
        return "refused"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = Draft(shards=2).write(tmp_path_factory.mktemp("fuzz") / "checkpoint")
    assert outcome(found) == SOUND
    return found


@pytest.fixture
def kept(folder):
    """The folder, whose files are put back after the test."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    yield folder
    for path, content in before.items():
        path.write_bytes(content)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"quantization_config": ' + '{"a":' * 50_000 + "1" + "}" * 50_001,
        '{"quantization_config": {"quant_method": 1e999}}',
        '{"dtype": ' + "9" * 5000 + "}",
        '{"quantization_config": {}, "quantization_config": {}}',
        "\ufeff{}",
        "",
    ],
    ids=[
        "arrays",
        "objects",
        "a number beyond double",
        "a number of many digits",
        "a name twice",
        "a mark",
        "nothing",
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_hostile_json_is_a_problem(kept, name, text):
    (kept / name).write_text(text, encoding="utf-8")
    assert outcome(kept) == ExitCode.CONFORMANCE


@FUZZ
@given(data=st.data())
def test_a_configuration_with_anything_in_one_place(folder, data):
    path = folder / data.draw(st.sampled_from(["config.json", "model.safetensors.index.json"]))
    before = path.read_bytes()
    document = json.loads(before)
    place = data.draw(st.sampled_from(list(places(document))))
    found = document
    for step in place[:-1]:
        found = found[step]
    found[place[-1]] = data.draw(JSON)
    try:
        path.write_text(json.dumps(document))
        outcome(folder)
    finally:
        path.write_bytes(before)


@FUZZ
@given(data=st.data())
def test_a_shard_with_other_bytes(folder, data):
    path = folder / "model-00001-of-00002.safetensors"
    before = path.read_bytes()
    content = bytearray(before)
    header = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.integers(0, header) | st.integers(0, len(content) - 1))
    content[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    try:
        path.write_bytes(bytes(content))
        outcome(folder)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("shape", [[2**40, 2**40], [-1, 96], [20, 2**62], [0, 0]])
def test_absurd_sizes_are_a_problem(tmp_path, shape):
    draft = Draft()
    draft.tensors["a.weight_shape"] = np.array(shape, np.int64)
    assert outcome(draft.write(tmp_path / "checkpoint")) == ExitCode.CONFORMANCE
