"""Bad data, for backends that claim to look at it: to refuse it with a message is right (C12-C25)."""

from conformance.plugin import judges
from conformance.sources.asked import BadCodes


@judges("validation")
def test_validation(case, source, subject, judge):
    asked = source.validation(case)
    if isinstance(asked, BadCodes):
        judge.refusal(
            lambda: subject.pack(asked.bad, asked.axis, asked.words),
            control=lambda: subject.pack(asked.good, asked.axis, asked.words),
        )
    else:
        judge.refusal(
            lambda: subject.linear(asked.bad, [asked.x]),
            control=lambda: subject.linear(asked.good, [asked.x]),
        )
