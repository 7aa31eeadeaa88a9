"""Parameters of ETL: source, labels, splits and quarantine."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from tasks.config.form import Schema, always, must_be, when, when_given
from tasks.config.frozen import FrozenConfig
from tasks.config.patterns import compile_pattern
from tasks.config.run import TABLES, SparkRun
from tasks.credentials import Url
from tasks.errors import MOST_SHOWN, shown
from tasks.system.remote_file import check_remote_file, is_url

BUILTIN_DIGITS = "builtin:digits"
"""Source name of the 1,797 handwritten digits that come with scikit-learn, written out as PNG files."""


class LabelConfig(FrozenConfig):
    """Where the label of an image comes from."""

    rules: ClassVar[tuple[Schema, ...]] = (
        *(
            when("by", name, {"required": [name], "properties": {name: {"minLength": 1}}})
            for name in ("pattern", "file")
        ),
        *(when_given(name, must_be("by", name)) for name in ("pattern", "file")),
        always({"properties": {"file": {"pattern": r"^$|\.([cC][sS][vV]|[pP][aA][rR][qQ][uU][eE][tT])$"}}}),
    )

    by: Literal["folder", "pattern", "file"] = Field(
        "folder",
        description="folder: the file's parent folder; pattern: a regular expression on its path; file: a table",
    )
    pattern: str | None = Field(
        None,
        description="Regular expression searched in the path below the source; its one group, or the group named "
        r"label, is the label: \d+\.([^/]+)/ finds ak47 in 001.ak47/001_0001.jpg",
    )
    file: Url | None = Field(
        None,
        description="CSV or Parquet file (a path, or a URL that fsspec can open, ending in .csv or .parquet) with the "
        "columns path (below the source) and label, and split where split_by is file",
    )

    @model_validator(mode="after")
    def _name_one_way(self) -> Self:
        for name in ("pattern", "file"):
            value = getattr(self, name)
            if self.by == name and not value:
                raise ValueError(f"by is '{name}', but {name} is empty: set {name}, or leave out by")
            if value and self.by != name:
                raise ValueError(
                    f"{name} is '{_short(value)}', but by is '{self.by}', which has no use for it: set by to '{name}', "
                    f"or leave out {name}"
                )
        return self

    @model_validator(mode="after")
    def _find_one_label(self) -> Self:
        if not self.pattern:
            return self
        pattern = _short(self.pattern)
        try:
            compiled = compile_pattern(self.pattern)
        except ValueError as error:
            raise ValueError(f"pattern is '{pattern}', which {error}") from None
        if compiled.groups != 1 and "label" not in compiled.groupindex:
            raise ValueError(
                f"pattern is '{pattern}', which has {compiled.groups} groups: put exactly one pair of parentheses "
                "around the label, or name its group: (?P<label>...)"
            )
        return self

    @model_validator(mode="after")
    def _know_the_format(self) -> Self:
        if self.file and not self.file.lower().endswith((".csv", ".parquet")):
            raise ValueError(
                f"file is '{_short(self.file.partition('?')[0])}', which ends in neither .csv nor .parquet: "
                "give one of these"
            )
        if self.file and is_url(self.file):
            check_remote_file(self.file)
        return self


def _short(value: str) -> str:
    return shown(value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}...")


class EtlConfig(FrozenConfig):
    """From a folder of images to the Delta tables `images` and `files`."""

    rules: ClassVar[tuple[Schema, ...]] = (
        when("split_by", "file", {"required": ["labels"], "properties": {"labels": must_be("by", "file")}}),
    )

    source: Url = Field(
        BUILTIN_DIGITS,
        min_length=1,
        description=f"Folder of class folders with jpg, jpeg or png files (a path or URL), or {BUILTIN_DIGITS}",
    )
    labels: LabelConfig = LabelConfig()
    stored_side: int = Field(
        512, ge=16, le=16384, description="Images with a longer side than this (pixels) are scaled down to it"
    )
    split_by: Literal["stratified", "content", "folder", "file"] = Field(
        "stratified",
        description="stratified: each class is split by the fractions, to one image; content: each image is drawn by "
        "its content and the seed alone; folder: the first of the folders train, val and test in its path; file: the "
        "column split of labels.file. A table that was made with content goes on with it",
    )
    val_fraction: float = Field(
        0.1, ge=0.0, lt=1.0, description="Share of the images in the split `val` (split_by stratified or content)"
    )
    test_fraction: float = Field(
        0.1, ge=0.0, lt=1.0, description="Share of the images in the split `test` (split_by stratified or content)"
    )
    split_seed: int = Field(
        1, ge=0, lt=2**53, description="Seed of the split; the same images and seed give the same split"
    )
    deleted: Literal["remove", "keep"] = Field(
        "remove",
        description="What becomes of the image of a deleted file: it leaves the table images, or stays; the ledger "
        "says deleted either way",
    )
    max_bad_fraction: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="The run fails, tables unchanged, when more than this share of the files is quarantined",
    )
    min_images_per_class: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="The run fails, tables unchanged, when a class has fewer usable images than this in all splits "
        "together; 0 sets no bound",
    )
    near_duplicate_bits: int = Field(
        3,
        ge=0,
        le=8,
        description="Images in different splits whose 64-bit perceptual hashes differ in at most so many bits are "
        "reported as near-duplicates",
    )
    max_pixels: int = Field(
        89_478_485,
        ge=256,
        le=178_956_970,
        description="Images with more pixels than this (by their header) are quarantined, never decoded",
    )
    min_side: int = Field(2, ge=1, le=1024, description="Images with a shorter side than this (pixels) are quarantined")
    replace_source: bool = Field(
        False, description="Let a source or labels other than those the tables were made from replace their contents"
    )

    @model_validator(mode="after")
    def _leave_something_to_train_on(self) -> Self:
        if self.val_fraction + self.test_fraction >= 1.0:
            raise ValueError(
                f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction} leave nothing to train on: "
                "make their sum less than 1"
            )
        return self

    @model_validator(mode="after")
    def _read_splits_beside_labels(self) -> Self:
        if self.split_by == "file" and self.labels.by != "file":
            raise ValueError(
                f"split_by is 'file' and labels.by is '{self.labels.by}', so no file names a split: "
                "set labels.by to 'file' and labels.file, or split_by to 'stratified' or 'folder'"
            )
        return self


SOURCE = {"source": ("etl", "source")}


A_FOLDER = ("source", "your folder of class folders, or builtin:digits")


class EtlRun(SparkRun):
    """Parameters of the flow `etl`."""

    first = SOURCE | TABLES
    required = A_FOLDER

    etl: EtlConfig = EtlConfig()
