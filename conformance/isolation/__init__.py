"""A backend in a process of its own: what it breaks, it breaks for one case.

supervisor  starts a host for each backend and GPU, replaces those that die, ends them
host        inside that process: the backend, asked one thing at a time
remote      what the judge sees of it
kernels     which kernels a call launched
"""
