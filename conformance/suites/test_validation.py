"""Bad data, for backends that claim to look at it: to refuse it with a message is right (C12-C25)."""

from conformance.data import codes_in_range, codes_out_of_range, defective_layer, packing_axis
from conformance.plugin import judges
from reference.packing import pack


@judges("validation")
def test_validation(case, subject, judge):
    if case.recipe == "code-range":
        good, bad, axis = codes_in_range(case), codes_out_of_range(case), packing_axis(case)
        words = pack(good, case.weight.bits, axis).shape
        judge.refusal(lambda: subject.pack(bad, axis, words), control=lambda: subject.pack(good, axis, words))
    else:
        good, bad, x = defective_layer(case)
        judge.refusal(lambda: subject.linear(bad, [x]), control=lambda: subject.linear(good, [x]))
