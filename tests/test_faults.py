"""Every deliberately wrong backend turns a run red, and says what is wrong."""

import faulty
import pytest
from conftest import FAULTY

# fault -> a case set that must see it, and words that must be in the diagnosis
SEEN_BY = {
    "floor_words": ("packing/w3/*", "returned shape"),
    "last_partial_word_unread": ("dequantize/w3-channel-sym/bf16/n130-k272/*", "columns 266..271"),
    "straddling_bits_dropped_for_3_bits": ("linear/w3-g32-sym/a16/bf16/m544-*", "elements are wrong"),
    "aligned_words": ("packing/w5/dim1/n10-k33/*", "elements are wrong"),
    "zero_point_ignored": ("linear/w4-g128-asym/a16/bf16/m17-*", "elements are wrong"),
    "zero_point_plus_one": ("linear/w4-g128-asym/a16/bf16/m17-*", "elements are wrong"),
    "group_index_shifted": ("linear/w4-g32-sym/a16/fp16/m17-*", "elements are wrong"),
    "scale_of_group_0": ("dequantize/w4-g32-sym/bf16/n72-k544/*", "columns 32..543"),
    "channel_read_as_group_size_1": ("linear/w4-channel-sym/a16/bf16/m17-*", "elements are wrong"),
    "scale_truncated_to_bf16": ("linear/w4-channel-sym/a16/fp16/m17-*", "elements are wrong"),
    "last_column_dropped": ("linear/w4-g128-sym/a16/bf16/m384-*", "row"),
    "bias_dropped": ("linear/w4-g128-sym/a16/bf16/*-bias/*", "elements are wrong"),
    "one_code_of_a_matrix_wrong_by_one": ("linear/w8-channel-asym/a16/bf16/m64-n64-k64/*", "column"),
    "output_truncated": ("linear/w4-g128-sym/a16/bf16/*/random-0", "allowed"),
    "claims_and_raises": (
        "linear/w5-g32-sym/a16/bf16/m17-*",
        "claims the case and refuses it: NotImplemented",
    ),
    "declines_and_computes": ("linear/w6-g32-sym/a16/bf16/m17-*", "right: works but unclaimed"),
    "declines_and_computes_garbage": ("linear/w6-g32-sym/a16/bf16/m17-*", "the answer is wrong"),
    "claims_to_validate_and_computes": ("validation/w4-*", "computes with bad data (scale-nan)"),
    "refuses_everything_as_bad_data": ("validation/w4-*", "good data do not pass it either"),
    "second_step_is_skipped": ("packing/w4/dim1/n4-k32/*", "skipped, and no verdict says why"),
    "second_step_is_cancelled": ("packing/w4/dim1/n4-k32/*", "CancelledError"),
    "changes_its_mind": ("packing/w4/dim1/n4-k32/*", "and computes it all the same"),
    "wrong_neighbour_within_the_bound": ("linear/w4-g128-*/fp16/*/random-0", "together more than it can tip"),
    "declines_after_the_fact": ("linear/w4-g128-sym/a16/bf16/m1-*", "claims the case and refuses it"),
    "supports_raises": ("packing/w4/*", "supports() raised KeyError"),
    "wrong_shape": ("linear/w4-g128-sym/a16/bf16/m17-*", "returned shape"),
    "wrong_dtype": ("linear/w4-g128-sym/a16/bf16/m17-*", "returned dtype float32, expected bfloat16"),
    "wrong_kind": ("linear/w4-g128-sym/a16/bf16/m17-*", "returned a list"),
    "one_nan": ("linear/w4-g128-sym/a16/bf16/m17-*", "2 NaN"),
    "output_never_written": ("linear/w4-g128-sym/a16/bf16/m17-*", "elements are wrong"),
    "first_answer_kept": ("linear/w4-g128-sym/a16/bf16/m17-*", "elements are wrong"),
    "skips": ("linear/w4-g128-sym/a16/bf16/m17-*", "skipped, and no verdict says why"),
    "exits": ("linear/w4-g128-sym/a16/bf16/m17-*", "SystemExit"),
}
ELSEWHERE = {"no_fault", "declines_everything", "kills_its_process"}


def test_every_fault_is_tried():
    assert set(faulty.FAULTS) == set(SEEN_BY) | ELSEWHERE


@pytest.mark.parametrize("fault", SEEN_BY)
def test_a_fault_fails_the_run(fault, quantcts):
    query, words = SEEN_BY[fault]
    run = quantcts("run", "--backend", f"{FAULTY}:{fault}", "--cases", query)
    assert run.code == 1, run.output
    details = [c.get("detail", "") for c in run.report["cases"]] + run.problems
    assert any(words in detail for detail in details), run.output


def test_the_same_cases_pass_without_a_fault(quantcts):
    queries = [word for query, _ in SEEN_BY.values() for word in ("--cases", query)]
    run = quantcts("run", "--backend", f"{FAULTY}:no_fault", *queries)
    assert run.code == 0, run.output
    assert set(run.outcomes.values()) == {"conforms"}


def test_a_dying_process_costs_its_case_alone(quantcts):
    query = "linear/w{3,4}-g128-sym/a16/bf16/m17-n160-k640/*"
    run = quantcts("run", "--backend", f"{FAULTY}:kills_its_process", "--cases", query,
                   "--cases", "linear/w{3,4}-g128-sym/a16/bf16/m1-n64-k128/*", "-n", "2")  # fmt: skip
    assert run.code == 1, run.output
    assert not run.problems
    for case, outcome in run.outcomes.items():
        assert outcome == ("crashes" if "/w4-" in case else "conforms"), case


def test_any_exception_with_a_message_is_a_refusal_of_a_declined_case(quantcts, tmp_path):
    path = tmp_path / "unsupported.py"
    path.write_text(
        "from conformance.backend import Support\n"
        "from conformance.backends.numpy import NumpyBackend\n"
        "class Unsupported(Exception): pass\n"
        "class Honest(NumpyBackend):\n"
        "    def supports(self, case):\n"
        "        return Support.no('no 3 bits') if case.weight.bits == 3 else Support.yes()\n"
        "    def load_linear(self, checkpoint):\n"
        "        if checkpoint.weights['num_bits'] == 3:\n"
        "            raise Unsupported('no 3 bits')\n"
        "        return super().load_linear(checkpoint)\n"
    )
    run = quantcts("run", "--backend", f"{path}:Honest", "--cases", "linear/w{3,4}-g128-sym/a16/bf16/m1-*")
    assert run.code == 0, run.output
    for case, outcome in run.outcomes.items():
        assert outcome == ("declines" if "/w3-" in case else "conforms"), case


def test_a_refusal_that_names_nothing_of_the_cell_is_noted(quantcts, tmp_path):
    path = tmp_path / "terse.py"
    path.write_text(
        "from conformance.backend import Support\n"
        "from conformance.backends.numpy import NumpyBackend\n"
        "class Terse(NumpyBackend):\n"
        "    said = 'unsupported'\n"
        "    def supports(self, case):\n"
        "        return Support.no('no asymmetric weights')\n"
        "    def load_linear(self, checkpoint):\n"
        "        raise NotImplementedError(self.said)\n"
        "class Plain(Terse):\n"
        "    said = 'asymmetric weights of 5 bits are not supported'\n"
    )
    query = "linear/w5-g128-asym/a-int8/bf16/m1-*"
    for name, note in (("Terse", "the refusal names nothing of the cell"), ("Plain", "")):
        run = quantcts("run", "--backend", f"{path}:{name}", "--cases", query)
        assert {c.get("note", "") for c in run.report["cases"]} == {note}
        assert set(run.outcomes.values()) == {"declines"}


def test_a_fault_of_one_bit_width_leaves_the_others_alone(quantcts):
    run = quantcts("run", "--backend", f"{FAULTY}:straddling_bits_dropped_for_3_bits", "--cases",
                   "dequantize/w{2,3,4}-g32-sym/bf16/*")  # fmt: skip
    for case, outcome in run.outcomes.items():
        assert outcome == ("diverges" if "/w3-" in case else "conforms"), case
