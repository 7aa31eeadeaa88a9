"""Parameters of ETL: source, labels, splits and quarantine."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tasks.config.frozen import AsBefore, FrozenConfig
from tasks.config.patterns import compile_pattern
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import Fraction, Seconds, check_remote_file, is_url
from tasks.credentials import Url
from tasks.errors import MAX_SHOWN, WrongInput, loggable

BUILTIN_DIGITS = "builtin:digits"
"""Source name of the 1,797 handwritten digits that come with scikit-learn, written out as PNG files."""


class LabelConfig(FrozenConfig):
    """Source of the labels: folder names, a regular expression on the path, or a label file."""

    by: Literal["folder", "pattern", "file"] = Field(
        "folder",
        description="Source of an image's label: its parent folder (folder), a regular expression on its path "
        "(pattern), or a label file (file)",
    )
    pattern: str | None = Field(
        None,
        description="Regular expression to search for in the path relative to the source. Its only group, or the group "
        r"named `label`, is the label: \d+\.([^/]+)/ finds ak47 in 001.ak47/001_0001.jpg",
    )
    file: Url | None = Field(
        None,
        description="CSV or Parquet file with the columns path (relative to the source) and label, and split if "
        "split_by is file. A path, or a URL that fsspec can open, ending in .csv or .parquet",
        json_schema_extra={"pattern": r"^$|\.([cC][sS][vV]|[pP][aA][rR][qQ][uU][eE][tT])$"},
    )

    @model_validator(mode="after")
    def _check_label_source(self) -> Self:
        _check_used(self, self.by, ("pattern", "file"))
        if self.file and not self.file.lower().endswith((".csv", ".parquet")):
            raise WrongInput(
                f"file is '{_truncated(self.file.partition('?')[0])}', which ends in neither .csv nor .parquet",
                setting="file",
                way_out="give one of these",
            )
        if self.file and is_url(self.file):
            check_remote_file(self.file)
        _check_groups(self.pattern, "label")
        return self


class SplitGroupConfig(FrozenConfig):
    """Groups of images that have one split: those of a patient, a video or a burst."""

    by: Literal["none", "pattern", "column", "near_duplicates"] = Field(
        "none",
        description="Source of an image's group: none, a regular expression on its path (pattern), a column of "
        "labels.file (column), or perceptual hashes that differ in at most near_duplicate_bits (near_duplicates). An "
        "image without a group is one of its own",
    )
    pattern: str | None = Field(
        None,
        description="Regular expression to search for in the path relative to the source. Its only group, or the group "
        r"named `group`, is the name of the images' group: (patient\d+)_ finds patient7 in sick/patient7_02.png",
    )
    column: str | None = Field(
        None, max_length=200, description="Column of labels.file with the name of the image's group, such as patient"
    )

    @model_validator(mode="after")
    def _check_source_of_groups(self) -> Self:
        _check_used(self, self.by, ("pattern", "column"))
        _check_groups(self.pattern, "group")
        return self


def _check_used(settings: FrozenConfig, by: str, names: Sequence[str]) -> None:
    """Raise WrongInput if the setting that `by` names is empty, or another one is set."""
    for name in names:
        value = getattr(settings, name)
        if by == name and not value:
            raise WrongInput(
                f"by is '{name}', but {name} is empty", setting="by", way_out=f"set {name}, or leave out by"
            )
        if value and by != name:
            raise WrongInput(
                f"{name} is '{_truncated(value)}', but by is '{by}', which does not use it",
                setting=name,
                way_out=f"set by to '{name}', or leave out {name}",
            )


def _check_groups(expression: str | None, name: str) -> None:
    """Raise WrongInput if a pattern is not a regular expression with one group, or a group of this name."""
    if not expression:
        return
    pattern = _truncated(expression)
    try:
        compiled = compile_pattern(expression)
    except WrongInput as error:
        text = f"pattern is '{pattern}', which {error}"
        raise WrongInput.complete(text, setting="pattern", way_out=error.way_out) from None
    if compiled.groups != 1 and name not in compiled.groupindex:
        raise WrongInput(
            f"pattern is '{pattern}', which has {compiled.groups} groups",
            setting="pattern",
            way_out=f"put exactly one pair of parentheses around the {name}, or name its group: (?P<{name}>...)",
        )


def _truncated(value: str) -> str:
    return loggable(value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}...")


class EtlConfig(FrozenConfig):
    """Ingestion of a folder of images into the Delta tables `images` and `files`."""

    source: Url = Field(
        BUILTIN_DIGITS,
        min_length=1,
        description=f"Folder of class folders with images (a path or URL), or {BUILTIN_DIGITS}",
    )
    labels: LabelConfig = LabelConfig()
    stored_side: int = Field(
        512, ge=16, le=16384, description="Maximum side of a stored image, in pixels; larger images are scaled down"
    )
    split_by: Literal["stratified", "content", "folder", "file"] = Field(
        "stratified",
        description="Assignment of images to splits. With stratified, each class is divided by the fractions, exact to "
        "one image. With content, each image is assigned by its content and the seed alone. With folder, the split is "
        "the first folder named train, val (or valid) or test in the path. With file, it is the column split of "
        "labels.file. A table created with content continues to use it",
    )
    split_group: Annotated[SplitGroupConfig, AsBefore(SplitGroupConfig())] = SplitGroupConfig()
    val_fraction: float = Field(
        0.1, ge=0.0, lt=1.0, description="Fraction of the images in the split `val` (split_by stratified or content)"
    )
    test_fraction: float = Field(
        0.1, ge=0.0, lt=1.0, description="Fraction of the images in the split `test` (split_by stratified or content)"
    )
    split_seed: int = Field(
        1, ge=0, lt=2**53, description="Seed of the split; the same images and seed always give the same split"
    )
    sample_fraction: Annotated[float, AsBefore(1.0)] = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Fraction of the images to ingest, for a first look: a sample by a hash of their paths, which is "
        "part of any larger one. The tables keep it",
    )
    deleted: Literal["remove", "keep"] = Field(
        "remove",
        description="Treatment of a deleted file's image in the table `images`: remove or keep; the table `files` "
        "records the file as deleted either way",
    )
    max_bad_fraction: Fraction = Field(
        0.1,
        description="Maximum fraction of quarantined files; above it the run fails and leaves the tables unchanged",
    )
    max_deleted_fraction: Fraction = Field(
        0.2,
        description="Maximum fraction of images that may leave the table `images` in a run, of all and of each class. "
        "Five may leave in any case, but never the last of a class. Above it the run fails and leaves the tables "
        "unchanged. 1: no maximum, such as for one run after files were deleted on purpose",
    )
    min_images_per_class: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Minimum number of usable images per class, over all splits; below it the run fails and leaves the "
        "tables unchanged. 0: no minimum",
    )
    near_duplicate_bits: int = Field(
        3,
        ge=0,
        le=8,
        description="Maximum Hamming distance, in bits, between the 64-bit perceptual hashes of images in different "
        "splits that are reported as near-duplicates; also between images of a group by split_group near_duplicates",
    )
    max_pixels: int = Field(
        89_478_485,
        ge=256,
        le=178_956_970,
        description="Maximum number of pixels of an image; larger ones, by their header, are quarantined without being "
        "decoded",
    )
    min_side: int = Field(
        2, ge=1, le=1024, description="Minimum side of an image, in pixels; images with a shorter one are quarantined"
    )
    sample_bits: int | None = Field(
        None,
        ge=8,
        le=31,
        description="Bits that samples of more than 8 bits use, such as 12 for a 12-bit camera's 16-bit files. Empty: "
        "as each file says; where it does not and the samples use less than a sixteenth of 16 bits, it is quarantined",
    )
    decode_version: Literal[1, 2, 3] = Field(
        3,
        description="Version of the decoding of new tables. A table of an earlier version keeps it. Version 1 takes "
        "the upper 8 of 16 bits. Version 2 scales samples by their range. With version 3, the colours of files with a "
        "profile become sRGB, too",
    )
    replace_source: bool = Field(
        False, description="Allow a source or labels that the tables were not created from to replace their contents"
    )
    timeout_seconds: Seconds = Field(
        86_400, description="Timeout of ETL, in seconds, for one attempt; a longer attempt is not retried"
    )

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if self.val_fraction + self.test_fraction >= 1.0:
            raise WrongInput(
                f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction} leave nothing to train on",
                setting="val_fraction",
                way_out="make their sum less than 1",
            )
        if self.sample_bits is not None and self.decode_version == 1:
            raise WrongInput(
                f"sample_bits is {self.sample_bits}, but decode_version is 1, which does not use it",
                setting="sample_bits",
                way_out="leave out one of them",
            )
        if self.split_by == "file" and self.labels.by != "file":
            raise WrongInput(
                f"split_by is 'file' and labels.by is '{self.labels.by}', so no file names a split",
                setting="split_by",
                way_out="set labels.by to 'file' and labels.file, or split_by to 'stratified' or 'folder'",
            )
        if self.split_group.by != "none" and self.split_by in {"folder", "file"}:
            raise WrongInput(
                f"split_group.by is '{self.split_group.by}', but split_by is '{self.split_by}', which names each split",
                setting="split_group.by",
                way_out="leave out split_group, or set split_by to 'stratified' or 'content'",
            )
        if self.split_group.by == "column" and self.labels.by != "file":
            raise WrongInput(
                f"split_group.by is 'column' and labels.by is '{self.labels.by}', so no file has a column",
                setting="split_group.by",
                way_out="set labels.by to 'file' and labels.file, or split_group.by to 'pattern'",
            )
        return self


SOURCE = {"source": ("etl", "source")}


REQUIRED_SOURCE = ("source", "your folder of class folders, or builtin:digits")


class EtlRun(SparkRun):
    """Parameters of the flow `etl`."""

    first_screen = SOURCE | TABLES
    required = REQUIRED_SOURCE

    etl: EtlConfig = EtlConfig()
