"""The transport for GPUs. Where there are none its logic is run with gloo in NCCL's place: the same calls on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from colrow.comm import launch
from tests import comm_ranks


@pytest.mark.process
def test_logic_without_gpus() -> None:
    launch.spawn(comm_ranks.everything_by_queue, 2, backend="gloo")


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus() -> None:
    launch.spawn(comm_ranks.on_gpus, 2, backend="nccl")
