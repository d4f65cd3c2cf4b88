"""Codes to 32-bit words and back, golden word by word (C10-C14)."""

from conformance.plugin import judges


@judges("packing")
def test_packing(case, source, subject, judge):
    asked = source.packing(case)
    codes, axis, words = asked.codes, asked.axis, asked.words
    judge(subject.pack(codes, axis, words.shape), asked.pack, step="pack")
    judge(subject.unpack(words, axis, codes.shape), asked.unpack, step="unpack")
