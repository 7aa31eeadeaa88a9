"""Parameters of the training cache."""

from typing import Literal

from pydantic import Field

from tasks.config.frozen import FrozenConfig
from tasks.config.run import SparkRun
from tasks.config.values import KeepDays, TableVersion


class CacheConfig(FrozenConfig):
    """From one Delta version to decoded pixels in Parquet, read with petastorm."""

    image_size: int = Field(224, ge=16, le=1024, description="Side of the square images that training sees, in pixels")
    format: Literal["uint8", "jpeg"] = Field(
        "uint8", description="uint8: raw pixels, the fastest; jpeg: about a tenth of the disk, decoded while training"
    )
    jpeg_quality: int = Field(
        90, ge=50, le=100, description="Quality of the images in a cache of format jpeg, by libjpeg's scale"
    )
    row_group_megabytes: int = Field(
        4, ge=1, le=256, description="Upper bound of one row group's pixels, the unit of reading, in MB"
    )

    verify: bool = Field(
        False, description="Check the sha256 of every file of a cache that is there already; a damaged one is rebuilt"
    )
    keep_days: KeepDays = Field(30, description="Caches unused for more days than this are removed; 0: none is removed")
    keep_gigabytes: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="While all caches take more GB than this, the longest unused are removed; empty: no bound",
    )

    @property
    def pixel_bytes(self) -> int:
        """Size of one image's pixels, uint8 HWC."""
        return self.image_size**2 * 3

    def decisive(self) -> dict[str, str | int]:
        """Return the settings that decide what a cache holds."""
        names = {"image_size", "format", "row_group_megabytes"} | ({"jpeg_quality"} if self.format == "jpeg" else set())
        return self.model_dump(include=names)


IMAGE_SIZE = {"image_size": ("cache", "image_size")}


class CacheRun(SparkRun):
    """Parameters of the flow `cache`."""

    first = IMAGE_SIZE

    cache: CacheConfig = CacheConfig()
    table_version: TableVersion | None = Field(None, description="Version of the table `images`; empty: the latest")
