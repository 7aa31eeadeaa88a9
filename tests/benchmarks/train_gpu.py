"""What a GPU trains a second in each number format and memory order; nothing where there is none."""

import time

import torch

from tasks.train.model import build_classifier
from tests.benchmarks.figures import Figure

BATCH_SIZE = 128
STEPS = 30
SIDE = 224
MODEL = "resnet50"

VARIANTS = (
    ("fp32", {}),
    ("TF32", {"tf32": True}),
    ("bf16", {"bf16": True}),
    ("bf16, channels-last", {"bf16": True, "channels_last": True}),
    ("bf16, channels-last, compiled", {"bf16": True, "channels_last": True, "compiled": True}),
)


def images_a_second(
    *, tf32: bool = False, bf16: bool = False, channels_last: bool = False, compiled: bool = False
) -> float:
    """Return the pictures a second of full fine-tuning on pictures that lie on the GPU."""
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.manual_seed(1)
    model = build_classifier(MODEL, "none", 10, freeze_backbone=False).to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.precision = torch.bfloat16 if bf16 else None
    if compiled:
        model.network.compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images = torch.randint(0, 256, (BATCH_SIZE, SIDE, SIDE, 3), dtype=torch.uint8, device=device)
    labels = torch.arange(BATCH_SIZE, device=device) % 10
    model.train()

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        torch.cuda.synchronize()

    run(5)  # Not counted: kernels are chosen and compiled.
    began = time.perf_counter()
    run(STEPS)
    return STEPS * BATCH_SIZE / (time.perf_counter() - began)


def gpu_figures() -> list[Figure]:
    """Return each variant beside float32; an empty list without a GPU."""
    if not torch.cuda.is_available():
        print("no GPU here: its figures are left out", flush=True)
        return []
    speeds = {name: images_a_second(**options) for name, options in VARIANTS}
    name = torch.cuda.get_device_name()
    return [
        Figure(f"images/s of {MODEL}, {variant}", speed, "", f"fp32 on {name}", speeds["fp32"], ratio, None, None)
        for variant, speed in speeds.items()
        for ratio in [speed / speeds["fp32"]]
    ]
