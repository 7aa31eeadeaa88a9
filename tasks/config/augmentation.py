"""Parameters of the augmentation of training images."""

from typing import Annotated

from pydantic import Field

from tasks.config.frozen import AsBefore, FrozenConfig


class AugmentationConfig(FrozenConfig):
    """Random augmentation of the training images on the training device; other splits are not augmented."""

    flip: bool = Field(False, description="Flip half of the images horizontally")
    resized_crop: float = Field(
        1.0, gt=0.0, le=1.0, description="Minimum area of a random resized crop as a fraction of the image; 1: no crop"
    )
    rand_augment: int = Field(
        0, ge=0, le=10, description="Number of RandAugment operations (colour and geometry) per image; 0: none"
    )
    mixup: float = Field(0.0, ge=0.0, le=10.0, description="Alpha of MixUp, which blends images and labels; 0: none")
    cutmix: float = Field(
        0.0, ge=0.0, le=10.0, description="Alpha of CutMix, which pastes a patch of another image; 0: none"
    )
    colour: Annotated[float, AsBefore(0.0)] = Field(
        0.0, ge=0.0, le=1.0, description="Maximum relative change of brightness and contrast; 0: none"
    )
    by_recipe: Annotated[bool, AsBefore(False)] = Field(
        True, description="Augment as the recipe does when it trains all layers, unless another augmentation is set"
    )

    @property
    def is_on(self) -> bool:
        """True if any augmentation is enabled."""
        return self != AugmentationConfig(by_recipe=self.by_recipe)
