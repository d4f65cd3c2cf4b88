"""Adapters: one module a backend, each exporting `backend` or a factory of that name."""
