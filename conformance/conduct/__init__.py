"""How a backend behaves beside what it computes: what is done to it, and what is held against it.

observed   what a check is given, and what it saw
needs      what a check asks of the machine
loaded     a layer of the backend's, as the checks call it
calls      repeat, inputs, outputs, alternating, empty
layouts    strided, batch
cuda       stream, graph, device
canary     canary: a process of its own, under an allocator of ours (guards, guards.cpp)
large      overflow
checks     the checks by name
problems   the data of a case, and what its outputs are held against
"""
