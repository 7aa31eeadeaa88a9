"""A bare script of torch for `torchrun`: DistributedDataParallel up to its first step, and then it ends.

Rank 0 prints the seconds of its parts as JSON after the step.
"""

import time

began = time.perf_counter()

import json
import os

import torch
import torchvision
from torch.nn import functional

imported = time.perf_counter()

BATCH, SIDE, NUM_CLASSES = (int(os.environ[name]) for name in ("BENCH_BATCH", "BENCH_SIDE", "BENCH_CLASSES"))


def main() -> None:
    """Train one step."""
    torch.distributed.init_process_group("gloo")
    connected = time.perf_counter()
    model = torch.nn.parallel.DistributedDataParallel(
        torchvision.models.get_model(os.environ["BENCH_MODEL"], num_classes=NUM_CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    inputs, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.arange(BATCH) % NUM_CLASSES
    prepared = time.perf_counter()
    functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    stepped = time.perf_counter()
    if torch.distributed.get_rank() == 0:
        parts = {
            "imports": imported - began,
            "rendezvous": connected - imported,
            "preparation": prepared - connected,
            "step": stepped - prepared,
        }
        print(json.dumps(parts), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
