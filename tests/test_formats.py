"""Weight and activation formats: their names, and what a configuration may say (C4, C20, C21)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.errors import FormatError, QuantizationError
from reference.formats import ActivationFormat, ScalarType, WeightFormat

# ---- scalar types


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        *((1, "uint1b1"), (2, "uint2b2"), (3, "uint3b4"), (4, "uint4b8")),
        *((5, "uint5b16"), (6, "uint6b32"), (7, "uint7b64"), (8, "uint8b128")),
    ],
)
def test_symmetric_weights_are_stored_with_a_bias(bits, name):
    assert WeightFormat(bits).scalar_type.name == name
    assert ScalarType.parse(name) == ScalarType(bits, 2 ** (bits - 1))
    assert WeightFormat(bits, symmetric=False).scalar_type.name == f"uint{bits}"


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_scalar_type_names_read_back(bits, signed):
    for bias in (0,) if signed else range(2**bits):
        scalar = ScalarType(bits, bias, signed)
        assert ScalarType.parse(scalar.name) == scalar


@pytest.mark.parametrize(
    "name",
    ["", "uint", "uint0", "uint9", "uint04", "int4b8", "uint4b", "uint4b-1", "float8", "UINT4", "uint4 "],
)
def test_other_names_are_no_scalar_types(name):
    with pytest.raises(FormatError, match=rf"^scalar type: '{name}'"):
        ScalarType.parse(name)


@pytest.mark.parametrize("name", ["uint4b16", "uint1b2", "uint8b256"])
def test_a_bias_lies_inside_its_bits(name):
    with pytest.raises(FormatError, match=r"bias outside its \d bits"):
        ScalarType.parse(name)


# ---- weight formats


@pytest.mark.parametrize(
    ("fmt", "name"),
    [
        (WeightFormat.of(3, 128, False), "w3-g128-asym"),
        (WeightFormat.of(4, -1, True), "w4-channel-sym"),
        (WeightFormat(8, strategy="tensor"), "w8-tensor-sym"),
    ],
)
def test_names_of_weight_formats(fmt, name):
    assert fmt.name == name


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_centred_on_zero(bits):
    fmt = WeightFormat(bits)
    assert fmt.offset == 2 ** (bits - 1)
    assert fmt.code_range == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def test_the_number_of_groups_is_exact():
    assert WeightFormat.of(4, -1, True).groups(250) == 1
    assert WeightFormat(4, strategy="tensor").groups(250) == 1
    assert WeightFormat.of(4, 32, True).groups(96) == 3
    assert WeightFormat.of(4, 32, True).groups(0) == 0
    assert WeightFormat(4, True, 32, "group", short_last_group=True).groups(97) == 4
    with pytest.raises(FormatError, match=r"^group_size: 32 does not divide K=97"):
        WeightFormat.of(4, 32, True).groups(97)


GROUP = {"num_bits": 4, "group_size": 128, "strategy": "group"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_bits", v) for v in (0, 9, -4, 4.0, "4", None, True, [4])),
        *(("type", v) for v in ("float", "Int", None, 4)),
        *(("symmetric", v) for v in (None, 1, 0, "true")),
        *(("group_size", v) for v in (0, -2, -128, 1.5, "128", True, False)),
        *(("strategy", v) for v in ("block", "token", "tensor_group", "attn_head", "Group", "", 3)),
        *(("dynamic", v) for v in (True, "local")),
        *(("actorder", v) for v in (True, "group", "dynamic", "act")),
    ],
)
def test_each_invalid_field_is_named(field, value):
    with pytest.raises(FormatError, match=rf"^{field}: .*{re.escape(repr(value))}"):
        WeightFormat.from_quantization_args({**GROUP, field: value})


@pytest.mark.parametrize(
    ("size", "strategy"), [(128, "channel"), (128, "tensor"), (-1, "group"), (None, "group")]
)
def test_group_size_and_strategy_have_to_fit(size, strategy):
    with pytest.raises(FormatError, match=rf"^group_size: .*'{strategy}'"):
        WeightFormat.from_quantization_args({"num_bits": 4, "group_size": size, "strategy": strategy})


@pytest.mark.parametrize("strategy", [None, "tensor", "channel", "group"])
@pytest.mark.parametrize("size", [0, -2, True])
def test_a_group_size_without_meaning_is_refused_under_any_strategy(size, strategy):
    with pytest.raises(FormatError, match=rf"^group_size: {size} is neither"):
        WeightFormat.from_quantization_args({"num_bits": 4, "group_size": size, "strategy": strategy})


def test_an_unknown_field_is_named_with_the_known_ones():
    with pytest.raises(FormatError, match=r"^weights: unknown field 'group'; known: .*group_size"):
        WeightFormat.from_quantization_args({"num_bits": 4, "group": 128})
    with pytest.raises(FormatError, match=r"^weights: \[4\] is not a mapping"):
        WeightFormat.from_quantization_args([4])


@pytest.mark.parametrize(
    ("args", "fmt"),
    [
        ({}, WeightFormat(8, strategy="tensor")),
        ({"num_bits": 4, "group_size": -1}, WeightFormat(4)),
        ({"num_bits": 4, "group_size": -1, "strategy": "channel"}, WeightFormat(4)),
        ({"num_bits": 4, "group_size": 64}, WeightFormat(4, True, 64, "group")),
        ({**GROUP, "symmetric": False}, WeightFormat(4, False, 128, "group")),
        ({**GROUP, "actorder": "weight"}, WeightFormat(4, True, 128, "group")),
        ({**GROUP, "actorder": "static", "dynamic": False}, WeightFormat(4, True, 128, "group")),
        ({**GROUP, "observer": "mse", "zp_dtype": "torch.int8"}, WeightFormat(4, True, 128, "group")),
    ],
)
def test_valid_arguments(args, fmt):
    assert WeightFormat.from_quantization_args(args) == fmt


FORMATS = st.builds(
    lambda bits, symmetric, size, strategy: WeightFormat(
        bits, symmetric, size if strategy == "group" else -1, strategy
    ),
    st.integers(1, 8),
    st.booleans(),
    st.integers(1, 4096),
    st.sampled_from(["tensor", "channel", "group"]),
)


@settings(deadline=None, database=None)
@given(FORMATS)
def test_weight_formats_read_back(fmt):
    assert WeightFormat.from_quantization_args(fmt.to_quantization_args()) == fmt


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
FIELDS = ["num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder"]


@settings(deadline=None, database=None, max_examples=150)
@given(
    args=st.dictionaries(st.sampled_from(FIELDS), JSON),
    kind=st.sampled_from([WeightFormat, ActivationFormat]),
)
def test_any_configuration_is_a_format_or_a_refusal(args, kind):
    try:
        fmt = kind.from_quantization_args({**GROUP, **args})
    except QuantizationError:
        return
    assert kind.from_quantization_args(fmt.to_quantization_args()) == fmt


# ---- activation formats


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (None, "a16"),
        ({"num_bits": 8, "dynamic": True, "strategy": "token"}, "a-int8"),
        ({"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": False}, "a-int8-asym"),
        ({"num_bits": 4, "dynamic": True, "strategy": "token"}, "a-int4"),
        ({"num_bits": 8, "type": "float", "dynamic": True, "group_size": 128}, "a-fp8-g128"),
        ({"num_bits": 8, "type": "float"}, "a-fp8-static"),
        ({"num_bits": 8, "dynamic": True}, "a-int8-tensor"),
    ],
)
def test_activation_formats(args, name):
    fmt = ActivationFormat.from_quantization_args(args)
    assert fmt.name == name
    assert ActivationFormat.from_quantization_args(fmt.to_quantization_args()) == fmt


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"num_bits": 6}, "num_bits, type"),
        ({"num_bits": 4, "type": "float"}, "num_bits, type"),
        ({"num_bits": [8]}, "num_bits, type"),
        ({"strategy": "token"}, "dynamic"),
        ({"dynamic": "local"}, "dynamic"),
        ({"symmetric": "no"}, "symmetric"),
        ({"strategy": "channel"}, "strategy"),
        ({"group_size": -1}, "strategy"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": -2}, "group_size"),
        ({"group_size": "128"}, "group_size"),
        ({"group_size": 128, "strategy": "tensor"}, "group_size"),
        ({"strategy": "group"}, "group_size"),
        ({"bits": 8}, "input_activations"),
    ],
)
def test_invalid_activation_arguments(args, field):
    with pytest.raises(FormatError, match=rf"^{field}: "):
        ActivationFormat.from_quantization_args(args)


def test_activation_formats_are_checked_when_made():
    with pytest.raises(FormatError, match=r"^kind: 'int3'"):
        ActivationFormat("int3")
    with pytest.raises(FormatError, match=r"^group_size: -2"):
        ActivationFormat("int8", strategy="tensor", group_size=-2)
