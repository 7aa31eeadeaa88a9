"""Precision, and the largest batch size that fits into memory."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tasks.errors import WrongInput
from tasks.model.precision import (
    _fits_gpu,
    choose_precision,
    forward_bytes,
    largest_batch,
    precision_name,
    trained_bytes,
)
from tasks.model.training_network import Classifier, build_classifier
from tasks.model_package.serving import computes_bf16

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def image(side: int) -> torch.Tensor:
    """Return the input of a classifier for one image."""
    return torch.zeros(side, side, 3, dtype=torch.uint8)


def small(*, frozen: bool) -> Classifier:
    """Return a small network, with a frozen backbone or fully trainable."""
    return build_classifier("shufflenet_v2_x0_5", "none", 3, freeze_backbone=frozen)


@pytest.fixture
def tf32_flags() -> Iterator[None]:
    """Restore the TF32 flags of torch, which are process-wide."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_fp32_disables_autocast() -> None:
    """With fp32 the computation is in the data type of the weights."""
    assert choose_precision("fp32", CPU) is None


def test_auto_uses_bf16_if_the_device_supports_it() -> None:
    """With auto the precision is bfloat16 or, without support for it, float32, and bf16 is refused."""
    if computes_bf16(CPU):
        assert choose_precision("auto", CPU) == choose_precision("bf16", CPU) == torch.bfloat16
    else:
        assert choose_precision("auto", CPU) is None
        with pytest.raises(WrongInput, match="is 'bf16' and cpu") as refused:
            choose_precision("bf16", CPU)
        assert refused.value.setting == "train.precision"


def test_auto_uses_float32_for_small_images_on_a_cpu() -> None:
    """For small images auto uses float32, as bfloat16 gradients on feature maps of one pixel may be non-finite."""
    assert choose_precision("auto", CPU, 32) is None


@pytest.mark.usefixtures("tf32_flags")
@pytest.mark.parametrize(
    ("wanted", "sums", "allowed", "name"),
    [
        ("fp32", None, False, "float32"),
        ("tf32", None, True, "tf32"),
        ("bf16", torch.bfloat16, True, "bfloat16"),
        ("auto", torch.bfloat16, True, "bfloat16"),
    ],
)
def test_gpu_uses_tf32_unless_fp32_is_requested(
    monkeypatch: pytest.MonkeyPatch, wanted: str, sums: torch.dtype | None, name: str, *, allowed: bool
) -> None:
    """The TF32 flags of matrix products and convolutions are set for each precision, as is the logged name."""
    monkeypatch.setattr("tasks.model.precision.computes_bf16", lambda device: True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not allowed

    assert choose_precision(wanted, GPU) == sums
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (allowed, allowed)
    assert precision_name(sums, GPU) == name
    # The flags of the GPU do not affect the CPU's precision.
    assert precision_name(None, CPU) == "float32"


@pytest.mark.usefixtures("tf32_flags")
def test_tf32_is_refused_without_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision tf32 is refused on CPUs and on older GPUs, where auto is float32."""
    with pytest.raises(WrongInput, match=r"'tf32'.* 8.0 or later.* the device is cpu: ") as refused:
        choose_precision("tf32", CPU)
    assert refused.value.setting == "train.precision"

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (6, 1))
    with pytest.raises(WrongInput, match=r"'tf32'.* 8.0 or later.* the device is cuda: "):
        choose_precision("tf32", GPU)
    assert precision_name(choose_precision("auto", GPU), GPU) == "float32"


def test_forward_bytes_scale_with_the_batch_and_leave_the_model_unchanged() -> None:
    """Twice the images take about twice the bytes, and weights, batch norm statistics and gradients are unchanged."""
    classifier = small(frozen=False)
    before = {name: value.clone() for name, value in classifier.state_dict().items()}

    four, eight = (forward_bytes(classifier, image(32), images) for images in (4, 8))

    assert 1.8 < eight / four < 2.2
    assert all(torch.equal(value, before[name]) for name, value in classifier.state_dict().items())
    assert all(parameter.grad is None for parameter in classifier.parameters())


def test_forward_bytes_equal_the_live_tensors() -> None:
    """The peak equals a count by hand of the tensors saved for the backward pass and the temporary ones."""
    size, images = 1024, 2
    network = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)))
    vectors, labels_and_loss = 4 * size * images, 100

    # Saved for gradients: the inputs of all four layers and the log-probabilities. The logits are alive as well.
    trainable = forward_bytes(network, torch.zeros(size), images)
    assert 6 * vectors <= trainable <= 6 * vectors + labels_and_loss

    # The inputs of the network are held by the caller; the input and the output of one layer are alive with them.
    frozen = forward_bytes(network.requires_grad_(False), torch.zeros(size), images)
    assert 3 * vectors <= frozen <= 3 * vectors + labels_and_loss


def test_frozen_backbone_needs_memory_for_its_largest_layers_only() -> None:
    """A frozen backbone needs less memory than a trainable one, and at least that of its first layers."""
    images, side = 8, 32
    pixels, first = side * side * 3, 24 * (side // 2) ** 2

    peak = forward_bytes(small(frozen=True), image(side), images)

    # The images as uint8 and as float32, and the first layer's output before and after its batch norm.
    assert peak >= images * (pixels + 4 * pixels + 2 * 4 * first)
    assert peak < forward_bytes(small(frozen=False), image(side), images) / 2


def test_compiled_network_is_measured_uncompiled() -> None:
    """A network that an earlier phase compiled gives the same bytes, and no compiler is run."""
    classifier = small(frozen=False)
    before = forward_bytes(classifier, image(32), 2)
    classifier.network.compile()
    assert forward_bytes(classifier, image(32), 2) == before


def test_largest_batch_allows_the_minimum_number_of_steps() -> None:
    """The batch size is a power of two with which an epoch has at least 20 steps over all ranks."""
    classifier = small(frozen=False)
    assert largest_batch(classifier, image(32), num_rows=1_000, num_ranks=1, device=CPU) == 32
    assert largest_batch(classifier, image(32), num_rows=1_000, num_ranks=2, device=CPU) == 16
    assert largest_batch(classifier, image(32), num_rows=3, num_ranks=1, device=CPU) == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_largest_batch_fits_into_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch, *, frozen: bool) -> None:
    """The batch fits into half of the free memory divided by the number of ranks, with frozen backbone or without."""
    classifier = small(frozen=frozen)
    image_bytes, trained = forward_bytes(classifier, image(64), 8) / 8, trained_bytes(classifier)

    monkeypatch.setattr("tasks.model.precision.free_memory", lambda: 2 * (40 * image_bytes + trained * 2))
    many = {"num_rows": 1_000_000, "device": CPU}
    assert largest_batch(classifier, image(64), num_ranks=1, copies=0, **many) >= 32
    assert largest_batch(classifier, image(64), num_ranks=2, copies=2, **many) == 16
    # An optimizer's state and buckets as large as the memory leave room for one image.
    assert largest_batch(classifier, image(64), num_ranks=1, copies=10**6, **many) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
    ],
    ids=str,
)
def test_search_of_the_batch_size_ends_on_every_kind_of_used_up_memory(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The last size that succeeded is the result; another error is raised."""

    class Limited(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if len(inputs) > 8:
                raise error
            return super().forward(inputs)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 20, 1 << 20))
    assert _fits_gpu(Limited(4, 3), torch.zeros(4), 64, CPU, 2) == 8

    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes"):
        _fits_gpu(Limited(4, 3), torch.zeros(4), 64, CPU, 2)
