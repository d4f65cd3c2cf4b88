"""The query language over ids."""

import pytest

from conformance.errors import RunError
from conformance.query import expand_braces, select

IDS = ["linear/w2-g32-sym/bf16/a", "linear/w3-g32-sym/bf16/a", "linear/w3-g32-sym/fp16/b", "packing/w3/c"]


@pytest.mark.parametrize(
    ("queries", "chosen"),
    [
        ([], [0, 1, 2, 3]),
        (["*"], [0, 1, 2, 3]),
        (["linear/*"], [0, 1, 2]),
        (["*w3*"], [1, 2, 3]),
        (["linear/w{2,3}-*/bf16/*"], [0, 1]),
        (["linear/w[23]-*/fp16/*"], [2]),
        (["linear"], [0, 1, 2]),
        (["linear/w3-g32-sym"], [1, 2]),
        (["linear/w3-g32-sym/"], [1, 2]),
        (["packing/w3/c"], [3]),
        (["!linear/*"], [3]),
        (["linear/*", "!*/fp16/*"], [0, 1]),
        (["linear/*", "!*/bf16/*", "packing/*"], [2, 3]),
        (["{linear,packing}/w3*"], [1, 2, 3]),
    ],
)
def test_select(queries, chosen):
    assert select(IDS, queries) == [IDS[i] for i in chosen]


@pytest.mark.parametrize("query", ["nothing", "linear/w3", "w3", "!nothing/*", "linear/w{4,5}-*", ""])
def test_a_query_that_matches_nothing_is_an_error(query):
    with pytest.raises(RunError, match="matches no case"):
        select(IDS, ["*", query])


@pytest.mark.parametrize("query", ["linear/w{2,3", "linear/w2,3}"])
def test_a_lonely_brace_is_an_error(query):
    with pytest.raises(RunError, match="partner"):
        select(IDS, [query])


def test_braces_nest():
    assert sorted(expand_braces("{a,b{1,2}}c")) == ["ac", "b1c", "b2c"]
