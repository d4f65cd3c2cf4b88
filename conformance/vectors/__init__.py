"""Golden vectors: inputs and right answers as files, for whoever never imports this Python.

tensors     safetensors, read and written byte by byte
document    the manifest: its form, its checks, and the tensors behind it
contracts   the promises under which vectors hold an expectation
flags       what a vector is there for
formats     what a manifest says of a case
bounded     outputs within stored ends, as an `Expected`
stored      a `Source` of vectors: no oracle
chosen      the cases that are vectors
made        from cases and the oracle to vectors
layouts     vectors of layouts that no backend is asked about
"""
