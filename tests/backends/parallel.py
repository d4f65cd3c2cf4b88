"""The oracle's own backend, with a fault on one rank of several: `parallel.py:<name>` makes one."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np
import torch.distributed

from conformance.backends.numpy import NumpyBackend


class Faulty(NumpyBackend):
    """Where a fault can be put: when rank 1 loads a layer of four experts or fewer; others are right."""

    def fault(self):
        raise NotImplementedError

    def load_moe(self, checkpoint):
        if checkpoint.experts <= 4 and torch.distributed.get_rank() == 1:
            self.fault()
        return super().load_moe(checkpoint)


class Refuses(Faulty):
    name = "refuses"

    def fault(self):
        raise NotImplementedError("shards of 4 bits are not supported")


class Breaks(Faulty):
    name = "breaks"

    def fault(self):
        {}["no such key"]


class Dies(Faulty):
    name = "dies"

    def fault(self):
        os._exit(7)


class Hangs(Faulty):
    name = "hangs"

    def fault(self):
        time.sleep(3600)


class NoBiasOnRank1(NumpyBackend):
    name = "no-bias"

    def load_moe(self, checkpoint):
        if torch.distributed.get_rank() == 1:
            zeros = np.zeros_like(checkpoint.tensors["w13_bias"])
            checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, "w13_bias": zeros})
        return super().load_moe(checkpoint)


class ReturnsFloat32OnRank1(NumpyBackend):
    name = "float32"

    def load_moe(self, checkpoint):
        layer = super().load_moe(checkpoint)
        wide = torch.distributed.get_rank() == 1
        return lambda *call: layer(*call).astype(np.float32) if wide else layer(*call)
