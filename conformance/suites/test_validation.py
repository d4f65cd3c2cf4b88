"""Bad data, for backends that claim to look at it: to refuse it with a message is right (C12-C25)."""

from conformance.data import codes_out_of_range, defective_layer, packing_axis
from conformance.plugin import judges


@judges("validation")
def test_validation(case, subject, judge):
    if case.recipe == "code-range":
        codes = codes_out_of_range(case)
        judge.refusal(lambda: subject.pack(codes, packing_axis(case), codes.shape))
    else:
        checkpoint, x = defective_layer(case)
        judge.refusal(lambda: subject.linear(checkpoint, [x]))
