"""Number formats, and how many images a step may have."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tasks.errors import WrongInput
from tasks.model.network import Classifier, build_classifier
from tasks.model.precision import choose_precision, computes_bf16, forward_bytes, largest_batch, precision_name

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def image(side: int) -> torch.Tensor:
    """Return what a classifier takes of one image."""
    return torch.zeros(side, side, 3, dtype=torch.uint8)


def small(*, frozen: bool) -> Classifier:
    """Return a network that is trained whole, or its head alone."""
    return build_classifier("shufflenet_v2_x0_5", "none", 3, freeze_backbone=frozen)


@pytest.fixture
def tf32_flags() -> Iterator[None]:
    """Put back what a GPU's float32 may be: it is set for the whole process."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_fp32_is_the_format_of_the_weights() -> None:
    """Asked for, it is taken on any device."""
    assert choose_precision("fp32", CPU) is None


def test_auto_takes_bf16_where_the_device_computes_in_it() -> None:
    """And float32 elsewhere, where bf16 is refused with the way out."""
    if computes_bf16(CPU):
        assert choose_precision("auto", CPU) == choose_precision("bf16", CPU) == torch.bfloat16
    else:
        assert choose_precision("auto", CPU) is None
        with pytest.raises(WrongInput, match=r"train.precision is 'bf16' and cpu has no instructions for it"):
            choose_precision("bf16", CPU)


def test_small_images_are_no_case_for_bf16_on_a_cpu() -> None:
    """Gradients on feature maps of one pixel are not to be trusted there."""
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
def test_a_gpu_takes_tf32_in_products_unless_fp32_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, wanted: str, sums: torch.dtype | None, name: str, *, allowed: bool
) -> None:
    """Those of matrices and of convolutions, whatever was set before; what is logged tells tf32 from fp32."""
    monkeypatch.setattr("tasks.model.precision.computes_bf16", lambda device: True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not allowed

    assert choose_precision(wanted, GPU) == sums
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (allowed, allowed)
    assert precision_name(sums, GPU) == name
    # What a GPU of this process may do is nothing to its CPU.
    assert precision_name(None, CPU) == "float32"


@pytest.mark.usefixtures("tf32_flags")
def test_tf32_is_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any CPU, and on GPUs before it; there auto is float32."""
    said = r"^train.precision is 'tf32', which GPUs of .* 8.0 and later have, and {} has not: set it to auto or fp32$"
    with pytest.raises(WrongInput, match=said.format("cpu")):
        choose_precision("tf32", CPU)

    monkeypatch.setattr("tasks.model.precision.computes_bf16", lambda device: False)
    with pytest.raises(WrongInput, match=said.format("cuda")):
        choose_precision("tf32", GPU)
    assert precision_name(choose_precision("auto", GPU), GPU) == "float32"


def test_a_forward_pass_takes_more_the_more_images_and_leaves_no_trace() -> None:
    """Twice the images take twice the bytes; weights, batch norm and gradients are as before."""
    classifier = small(frozen=False)
    before = {name: value.clone() for name, value in classifier.state_dict().items()}

    few, many = (forward_bytes(classifier, image(32), images) for images in (4, 8))

    assert 1.8 < many / few < 2.2
    assert all(torch.equal(value, before[name]) for name, value in classifier.state_dict().items())
    assert all(parameter.grad is None for parameter in classifier.parameters())


def test_a_forward_pass_takes_what_its_tensors_take_at_once() -> None:
    """Counted by hand: what the backward pass needs stays, all else goes when the next layer has used it."""
    size, images = 1024, 2
    network = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)))
    vectors, labels_and_loss = 4 * size * images, 100

    # Gradients need the inputs of all four layers and the logarithms of the probabilities; the logits are there, too.
    whole = forward_bytes(network, torch.zeros(size), images)
    assert 6 * vectors <= whole <= 6 * vectors + labels_and_loss

    # The inputs are held by who gave them; beside them there is what goes into one layer and what comes out of it.
    frozen = forward_bytes(network.requires_grad_(False), torch.zeros(size), images)
    assert 3 * vectors <= frozen <= 3 * vectors + labels_and_loss


def test_a_frozen_backbone_keeps_nothing_and_takes_its_largest_layers_all_the_same() -> None:
    """Less than a network that is trained whole; not less than its first layers have in hand at once."""
    images, side = 8, 32
    pixels, first = side * side * 3, 24 * (side // 2) ** 2

    taken = forward_bytes(small(frozen=True), image(side), images)

    # The images as bytes and as numbers, and the first layer's output before and after its batch norm.
    assert taken >= images * (pixels + 4 * pixels + 2 * 4 * first)
    assert taken < forward_bytes(small(frozen=False), image(side), images) / 2


def test_a_compiled_network_is_measured_as_it_is() -> None:
    """Without a compiler; an earlier stage may have compiled it."""
    classifier = small(frozen=False)
    before = forward_bytes(classifier, image(32), 2)
    classifier.network.compile()
    assert forward_bytes(classifier, image(32), 2) == before


def test_the_largest_batch_leaves_an_epoch_its_steps() -> None:
    """A power of two, of which at least 20 steps make an epoch on all ranks."""
    classifier = small(frozen=False)
    assert largest_batch(classifier, image(32), num_rows=1_000, num_ranks=1, device=CPU) == 32
    assert largest_batch(classifier, image(32), num_rows=1_000, num_ranks=2, device=CPU) == 16
    assert largest_batch(classifier, image(32), num_rows=3, num_ranks=1, device=CPU) == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_the_largest_batch_fits_the_memory(monkeypatch: pytest.MonkeyPatch, *, frozen: bool) -> None:
    """Of half the free memory, whatever is trained; ranks share it."""
    classifier = small(frozen=frozen)
    a_image = forward_bytes(classifier, image(64), 8) / 8

    monkeypatch.setattr("tasks.model.precision.free_memory", lambda: 2 * 40 * a_image)
    assert largest_batch(classifier, image(64), num_rows=1_000_000, num_ranks=1, device=CPU) == 32
    assert largest_batch(classifier, image(64), num_rows=1_000_000, num_ranks=2, device=CPU) == 16
