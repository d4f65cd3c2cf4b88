"""Codes to 32-bit words and back, golden word by word (C10-C14)."""

from conformance.data import packing_axis, packing_codes
from conformance.goals import pack_goal, unpack_goal
from conformance.plugin import judges
from reference.packing import pack


@judges("packing")
def test_packing(case, subject, judge):
    codes, axis = packing_codes(case), packing_axis(case)
    words = pack(codes, case.weight.bits, axis)
    judge(subject.pack(codes, axis, words.shape), lambda: pack_goal(case, codes, axis, words), step="pack")
    judge(
        subject.unpack(words, axis, codes.shape), lambda: unpack_goal(case, codes, axis, words), step="unpack"
    )
