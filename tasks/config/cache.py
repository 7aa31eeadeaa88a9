"""Parameters of the training cache."""

from typing import Any, Literal

from pydantic import Field

from tasks.config.frozen import FrozenConfig, hashed_settings
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import KeepDays, Seconds, TableVersion


class CacheConfig(FrozenConfig):
    """Training cache of one Delta version: images in Parquet files, read with petastorm."""

    image_size: int = Field(224, ge=16, le=1024, description="Side of the square training images, in pixels")
    format: Literal["uint8", "jpeg"] = Field(
        "uint8",
        description="uint8: raw pixels, fastest to read; jpeg: about a tenth of the size, decoded during training",
    )
    jpeg_quality: int = Field(90, ge=50, le=100, description="JPEG quality on libjpeg's scale (format jpeg)")
    row_group_megabytes: int = Field(
        4, ge=1, le=256, description="Maximum size of the pixels in a row group, the unit of reading, in MB"
    )

    verify: bool = Field(
        False, description="Verify the SHA-256 of every file of an existing cache; a damaged cache is rebuilt"
    )
    keep_days: KeepDays = Field(30, description="Days after which an unused cache is removed; 0: never")
    keep_gigabytes: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Maximum size of all caches, in GB; above it, the least recently used are removed. Empty: no limit",
    )
    timeout_seconds: Seconds = Field(
        86_400, description="Timeout of the build, in seconds, for one attempt; a longer attempt is not retried"
    )

    @property
    def pixel_bytes(self) -> int:
        """Size of one image's pixels, uint8 HWC, in bytes."""
        return self.image_size**2 * 3

    def decisive(self) -> dict[str, Any]:
        """Return the settings that determine the contents of a cache."""
        names = {"image_size", "format", "row_group_megabytes"} | ({"jpeg_quality"} if self.format == "jpeg" else set())
        return hashed_settings(self, names)


IMAGE_SIZE = {"image_size": ("cache", "image_size")}


class CacheRun(SparkRun):
    """Parameters of the flow `cache`."""

    first_screen = IMAGE_SIZE | TABLES

    cache: CacheConfig = CacheConfig()
    table_version: TableVersion | None = Field(None, description="Version of the table `images`; empty: the latest")
