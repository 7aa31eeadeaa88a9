"""A model of training on many GPUs, from published step times and bandwidths, and its error on ranks of this machine.

It is a model: nothing was measured on these GPUs. `scaling.py` checks its formula against ranks over Gloo.

Run: `.venv/bin/python tests/benchmarks/scaling_model.py`; it prints the efficiency on 8, 64 and 512 GPUs.
"""

from dataclasses import dataclass
from math import ceil

MIB = 2**20

BUCKET_BYTES = 25 * MIB
"""Gradients that are exchanged together: the default `bucket_cap_mb` of torch's DistributedDataParallel."""

BACKWARD_SHARE = 2 / 3
"""Share of a step's computation in the backward pass, which has two products of matrices per layer in place of one: for
its inputs and for its weights."""


@dataclass(frozen=True)
class Step:
    """A training step of one rank without other ranks."""

    name: str
    images: int
    """Images of a rank."""
    seconds: float
    gradient_bytes: int
    source: str


@dataclass(frozen=True)
class Link:
    """The slowest link of the ring in which the gradients are exchanged."""

    name: str
    bytes_per_second: float
    """Bandwidth of a rank's link: the bus bandwidth of NVIDIA's nccl-tests."""
    hop_seconds: float
    """Time of one of the 2 (n - 1) messages of a ring without its bytes."""
    source: str


def ring_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the time of an all-reduce in a ring.

    Each rank sends 2 (n - 1) messages of 1/n of the bytes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
    for clusters of workstations", 2009, section 3).
    """
    num_messages = 2 * (num_ranks - 1)
    return num_messages * (link.hop_seconds + num_bytes / num_ranks / link.bytes_per_second)


def overlapped_seconds(step: Step, num_ranks: int, link: Link) -> float:
    """Return the time of a step whose buckets of gradients are exchanged while the backward pass computes others.

    A bucket is sent when its gradients are complete and the one before it has been sent (Li et al., "PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training", 2020, section 3.2.3).
    """
    num_buckets = ceil(step.gradient_bytes / BUCKET_BYTES)
    exchange = ring_seconds(step.gradient_bytes / num_buckets, num_ranks, link)
    backward = BACKWARD_SHARE * step.seconds
    sent = 0.0
    for bucket in range(1, num_buckets + 1):
        complete = step.seconds - backward + backward * bucket / num_buckets
        sent = max(sent, complete) + exchange
    return sent


def efficiency(step: Step, num_ranks: int, link: Link) -> float:
    """Return the images per second of a rank relative to one without others, 0 to 1."""
    return 1.0 if num_ranks == 1 else step.seconds / overlapped_seconds(step, num_ranks, link)


RESNET50_BYTES = 25_557_032 * 4
"""Float32 gradients of torchvision's resnet50."""

PUBLISHED = (
    "NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, DGX A100 80GB, one GPU"
)

A100 = (
    Step(
        "resnet50, mixed precision, 256 images",
        256,
        256 / 2470,
        RESNET50_BYTES,
        f"{PUBLISHED}: 2,470 images/s; 0.84 on 8 GPUs",
    ),
    Step("resnet50, TF32, 256 images", 256, 256 / 938, RESNET50_BYTES, f"{PUBLISHED}: 938 images/s; 0.97 on 8 GPUs"),
    Step("resnet50, mixed precision, 32 images", 32, 32 / 2470, RESNET50_BYTES, "the same rate with fewer images"),
)

HOP_SECONDS = 123e-6 / 30
"""An all-reduce of 8 bytes over 16 GPUs of two machines took 123 us in a published run of nccl-tests: 30 messages."""

NVLINK = Link(
    "NVLink",
    300e9 * 370 / 450,
    HOP_SECONDS,
    "A100: 300 GB/s each way, of which NCCL reaches 370/450 (its author in NVIDIA/nccl-tests#212, on H100)",
)

NETWORKS = (
    Link("4 x InfiniBand HDR", 96e9, HOP_SECONDS, "NVIDIA/nccl-tests#119: 24 A100 in 3 machines reach 96 of 100 GB/s"),
    Link("Ethernet, 100 Gbit/s", 12.5e9, 10 * HOP_SECONDS, "line rate; a hop ten times as long is an assumption"),
    Link("Ethernet, 25 Gbit/s", 3.125e9, 10 * HOP_SECONDS, "line rate; a hop ten times as long is an assumption"),
)

PER_MACHINE = 8


def rows() -> list[tuple[str, str, list[float]]]:
    """Return step, network between machines, and the efficiency on 8 (one machine), 64 and 512 GPUs."""
    return [
        (
            step.name,
            network.name,
            [efficiency(step, number, NVLINK if number <= PER_MACHINE else network) for number in (8, 64, 512)],
        )
        for step in A100
        for network in NETWORKS
    ]


def table() -> str:
    """Return the efficiencies and their sources as Markdown."""
    head = "| step of one A100 | network between machines of 8 | 8 GPUs | 64 GPUs | 512 GPUs |\n|---|---|---|---|---|"
    lines = [
        f"| {step} | {network} | " + " | ".join(f"{share:.2f}" for share in shares) + " |"
        for step, network, shares in rows()
    ]
    sent = 2 * (1 - 1 / PER_MACHINE) * RESNET50_BYTES / MIB, 2 * RESNET50_BYTES / MIB
    note = f"Each GPU sends {sent[0]:.0f} MiB of gradients in a step of 8 GPUs, and {sent[1]:.0f} MiB in one of many."
    sources = [f"- {sourced.name}: {sourced.source}" for sourced in (*A100, NVLINK, *NETWORKS)]
    return "\n".join([head, *lines, "", note, "", *sources])


def main() -> None:
    """Print the table and its sources."""
    print(table())


if __name__ == "__main__":
    main()
