"""CUDA kernels of our own for every cell of the matrix, readable before fast, and what compiles and launches them.

`runtime` is where a user begins; the `.cu` files are the kernels, `mutants` the faults that can be compiled into them.
"""
