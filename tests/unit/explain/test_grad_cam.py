"""Heat maps: the right layer of each kind of network, the formula, and that they depend on the trained weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tasks.explain.explainer import Explainer, HeatOfPackage, blend, within_letterbox
from tasks.explain.grad_cam import HeatMaps, places_of, spatial_layer
from tasks.model_package.classifier import save_classifier
from tasks.model_package.decode import decode_pixels
from tasks.model_package.network import ImageNetwork, build_network, new_network

LAYERS = {
    "resnet18": ("network.layer4", 64),
    "mobilenet_v2": ("network.features", 64),
    "densenet121": ("network.features", 64),
    "squeezenet1_1": ("network.classifier.2", 64),
    "convnext_tiny": ("network.features", 64),
    "vit_b_16": ("network.encoder.layers.encoder_layer_11.ln_1", 64),
    "swin_t": ("network.permute", 64),
    "swin_v2_t": ("network.permute", 64),
    "timm:vit_tiny_patch16_224": ("network.blocks.11.norm1", 224),
    "timm:swin_tiny_patch4_window7_224": ("network.norm", 224),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_the_last_with_places_that_count(name: str) -> None:
    """Of convolutions, windows and tokens alike; the maps have the size of the images, and are from 0 to 1."""
    layer, side = LAYERS[name]
    torch.manual_seed(1)
    maps = HeatMaps(build_network(name, 4, side), side)
    images = torch.randint(0, 256, (3, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    found = maps(images, [0, 1, 3])

    assert maps.layer == layer
    assert found.shape == (3, side, side)
    assert found.dtype == torch.float32
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def small_network() -> ImageNetwork:
    """Return a network whose maps are computed by hand: two channels, their means, and a linear head."""
    network = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1.0, 0]])[..., None, None])
        network[3].weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    return ImageNetwork(network, network[3], (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)).eval()


def test_a_map_is_the_weighted_sum_of_channels() -> None:
    """By hand: red speaks for the first class and against the second, green the other way round."""
    image = torch.zeros((1, 8, 8, 3), dtype=torch.uint8)
    image[0, :4, :, 0] = 200
    image[0, 4:, :, 1] = 100
    maps = HeatMaps(small_network(), 8)
    red, green = maps(image, [0])[0], maps(image, [1])[0]

    assert maps.layer == "network.0"
    assert torch.equal(red[:4], torch.ones(4, 8))
    assert torch.equal(red[4:], torch.zeros(4, 8))
    assert torch.equal(green, 1 - red)


def test_a_map_without_evidence_is_zero() -> None:
    """It is not stretched to noise."""
    black = torch.zeros((1, 8, 8, 3), dtype=torch.uint8)

    assert float(HeatMaps(small_network(), 8)(black, [0]).abs().max()) == 0.0


def test_a_batch_has_the_maps_of_its_images() -> None:
    """No image affects another's."""
    torch.manual_seed(3)
    maps = HeatMaps(build_network("resnet18", 3, 64), 64)
    images = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    classes = [2, 0, 1, 0]
    alone = torch.cat([maps(image[None], [index]) for image, index in zip(images, classes, strict=True)])

    assert torch.allclose(maps(images, classes), alone, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((2, 5, 7, 7), (2, 5, 7, 7)),
        ((2, 7, 7, 5), (2, 5, 7, 7)),
        ((2, 50, 5), (2, 5, 7, 7)),
        ((2, 49, 5), (2, 5, 7, 7)),
        ((2, 5, 1, 1), None),
        ((2, 48, 5), None),
        ((2, 12, 50, 64), None),
        ((2, 5), None),
    ],
)
def test_places_of_tensors(shape: tuple[int, ...], places: tuple[int, ...] | None) -> None:
    """Images with channels first or last, and tokens with one for the class before them, or without."""
    found = places_of(torch.zeros(shape))

    assert (None if found is None else tuple(found.shape)) == places


def test_tokens_are_in_the_order_of_places() -> None:
    """By rows; that of the class is left out."""
    tokens = torch.arange(10.0).view(1, 10, 1)
    found = places_of(tokens)

    assert found is not None
    assert found[0, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_network_without_places_is_refused() -> None:
    """Its predictions have no heat map, and the sentence says so."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 8), nn.ReLU(), nn.Linear(8, 2))

    with pytest.raises(ValueError, match="the network has no layer with places"):
        spatial_layer(ImageNetwork(network, network[3]).eval(), 8)


@pytest.fixture(scope="module")
def photo_network(test_data: Path) -> ImageNetwork:
    """Return mobilenet_v2 with its pretrained weights, of ImageNet's classes."""
    network = new_network("mobilenet_v2")
    network.load_state_dict(torch.load(test_data / "weights" / "mobilenet_v2.pth", weights_only=True))
    return ImageNetwork(network, network.get_submodule("classifier.1")).eval()


@pytest.fixture(scope="module")
def photos(test_data: Path) -> torch.Tensor:
    """Return 24 photos, uint8 (24, 224, 224, 3)."""
    files = [sorted((test_data / "photos" / name).iterdir()) for name in ("dalmatian", "Leopards", "flamingo", "ibis")]
    chosen = [file for folder in files for file in folder[:6]]
    return torch.from_numpy(np.stack([decode_pixels(file.read_bytes(), 224) for file in chosen]))


def test_another_network_has_other_maps(photo_network: ImageNetwork, photos: torch.Tensor) -> None:
    """The sanity check of Adebayo et al., 2018: a map that does not depend on the weights would explain nothing."""
    classes = photo_network(photos).argmax(1).tolist()
    trained = HeatMaps(photo_network, 224)(photos, classes)
    torch.manual_seed(5)
    untrained = HeatMaps(build_network("mobilenet_v2", 1000, 224), 224)(photos, classes)

    similar = [
        float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].nan_to_num())
        for a, b in zip(trained, untrained, strict=True)
    ]
    assert abs(float(np.median(similar))) < 0.4
    again = HeatMaps(photo_network, 224)(photos, classes)
    assert torch.equal(trained, again)


def probabilities(network: ImageNetwork, images: torch.Tensor, classes: list[int]) -> torch.Tensor:
    """Return the probability of a class of each image."""
    with torch.inference_mode():
        return torch.softmax(network(images), 1)[torch.arange(len(images)), torch.tensor(classes)]


def test_what_a_map_names_counts_more_than_what_it_does_not(photo_network: ImageNetwork, photos: torch.Tensor) -> None:
    """Deletion: without the brightest 30 % of the places a class is less probable than without the darkest 30 %.

    As in Petsiuk et al., "RISE", 2018; the places get the mean colour, and not black, which would add edges.
    """
    classes = photo_network(photos).argmax(1).tolist()
    maps = HeatMaps(photo_network, 224)(photos, classes)
    whole = probabilities(photo_network, photos, classes)
    mean = photos.float().mean(dim=(1, 2), keepdim=True)
    left = []
    for sign in (1, -1):
        order = (sign * maps).flatten(1).argsort(dim=1, descending=True)
        removed = torch.zeros(maps.flatten(1).shape, dtype=torch.bool)
        removed.scatter_(1, order[:, : int(0.3 * order.shape[1])], value=True)
        images = torch.where(removed.view(maps.shape)[..., None], mean, photos.float()).to(torch.uint8)
        left.append(float(probabilities(photo_network, images, classes).mean()))

    assert left[0] < 0.6 * float(whole.mean()), (left, float(whole.mean()))
    assert left[0] < left[1] - 0.2


def test_an_explanation_covers_the_image_and_not_its_borders(
    tmp_path: Path, photo_network: ImageNetwork, test_data: Path
) -> None:
    """A photo that is wider than high has no map of the white above and below it."""
    network = build_network("mobilenet_v2", 1000, 224)
    network.load_state_dict(photo_network.state_dict())
    names = tuple(str(number) for number in range(1000))
    save_classifier(tmp_path, "mobilenet_v2", network.state_dict(), names, 224)
    content = min((test_data / "photos" / "dalmatian").iterdir()).read_bytes()
    explained = Explainer(tmp_path).explain(content)
    other = Explainer(tmp_path).explain(content, "0")

    assert explained.label == "251"  # ImageNet's dalmatian
    assert explained.probability > 0.5
    assert other.label == "0"
    assert other.probability < 0.1
    assert explained.jpeg != other.jpeg
    with pytest.raises(ValueError, match="'owl' is not a class of the model"):
        Explainer(tmp_path).explain(content, "owl")


def test_the_part_of_a_map_within_a_letterbox() -> None:
    """Without the borders that scaling has added."""
    square = np.arange(64, dtype=np.float32).reshape(8, 8)

    assert within_letterbox(square, (20, 10)).tolist() == square[2:6].tolist()
    assert within_letterbox(square, (10, 20)).tolist() == square[:, 2:6].tolist()
    assert within_letterbox(square, (7, 7)).tolist() == square.tolist()


def test_colours_cover_what_is_bright_alone() -> None:
    """An image stays as it is where the map is 0."""
    grey = np.full((1, 2, 3), 100, dtype=np.uint8)
    blended = blend(grey, np.array([[0.0, 1.0]], dtype=np.float32))

    assert blended[0, 0].tolist() == [100, 100, 100]
    assert blended[0, 1].tolist() == [201, 188, 94]  # 0.35 of the grey, 0.65 of the brightest colour


def test_images_of_a_gallery_have_their_map_beside_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Twice as wide; a network without places keeps the images as they are, with a warning."""
    torch.manual_seed(6)
    save_classifier(tmp_path, "resnet18", build_network("resnet18", 3, 64).state_dict(), ("a", "b", "c"), 64)
    images = torch.randint(0, 256, (11, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    wide = HeatOfPackage(tmp_path, torch.device("cpu")).beside(images, [index % 3 for index in range(11)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.explain.explainer.HeatMaps", _no_places)
        same = HeatOfPackage(tmp_path, torch.device("cpu")).beside(images, [0] * 11)

    assert wide.shape == (11, 64, 128, 3)
    assert torch.equal(wide[:, :, :64], images)
    assert not torch.equal(wide[:, :, 64:], images)
    assert torch.equal(same, images)
    assert "no layer with places" in caplog.text


def _no_places(*_arguments: object) -> None:
    raise ValueError("the network has no layer with places")
