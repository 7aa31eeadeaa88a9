"""Parameters of the service that predicts over HTTP, of its live test, and of explanations."""

import ipaddress
from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config.frozen import FrozenConfig
from tasks.config.prediction import PredictConfig
from tasks.config.promotion import MODEL_NAME, PromoteConfig
from tasks.config.run import TABLES, SparkRun
from tasks.config.values import Fraction, KeepDays, Seconds, Text
from tasks.credentials import Url
from tasks.errors import WrongInput


class ServeConfig(FrozenConfig):
    """The service."""

    host: Text = Field(
        "127.0.0.1",
        description="Address to listen on. An address that other machines can reach needs a key for all requests, in "
        "the environment variable LAKEVISION_API_KEY",
    )
    port: int = Field(8000, ge=1, le=65_535, description="Port to listen on")
    allowed_hosts: list[Text] = Field(
        default_factory=list,
        max_length=100,
        description="Names of this service in requests, beside host, 127.0.0.1 and localhost; others are refused",
    )
    num_workers: int = Field(1, ge=1, le=64, description="Processes that answer requests, each with the model")
    max_batch: int = Field(32, ge=1, le=1024, description="Maximum number of images that are predicted at once")
    max_wait_milliseconds: int = Field(
        5, ge=0, le=1000, description="Longest time that a batch waits for the images of requests that are arriving"
    )
    max_waiting: int = Field(
        256, ge=1, le=100_000, description="Images that may wait in a process; more are answered with status 429"
    )
    max_images: int = Field(32, ge=1, le=1000, description="Maximum number of images in a request")
    max_megabytes: int = Field(32, ge=1, le=1000, description="Maximum size of a request, in megabytes (10^6 bytes)")
    request_seconds: Seconds = Field(
        30, description="Time limit of a request: for its arrival, and again for its answer, in seconds"
    )
    log_requests: bool = Field(True, description="Whether answers become rows of the Delta table `requests`")
    keep_images: bool = Field(False, description="Whether images of requests are kept in the table `request_images`")
    keep_image_days: KeepDays = Field(7, description="Days after which a kept image is removed; 0: never")
    challenger: Literal["off", "shadow", "answers"] = Field(
        "off",
        description="Use of the version with the alias `challenger`. `shadow`: it predicts all images, and the "
        "champion answers. `answers`: it answers challenger_share of the images",
    )
    challenger_share: Fraction = Field(0.1, description="Share of the images that a challenger answers")
    run_seconds: Seconds | None = Field(
        None, description="Time after which the run ends, in seconds; empty: it runs until it is cancelled"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_images > self.max_waiting:
            raise WrongInput(
                f"max_images is {self.max_images}, more than max_waiting {self.max_waiting}",
                setting="max_images",
                way_out="raise max_waiting",
            )
        if not self.log_requests and (self.keep_images or self.challenger != "off"):
            name = "keep_images" if self.keep_images else "challenger"
            raise WrongInput(
                f"{name} is set, and log_requests is false, but answers are compared and images are found by the table "
                "`requests`",
                setting=name,
                way_out="leave out log_requests",
            )
        return self

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches the service."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


ANSWERING = ("alias", "top_k", "min_probability", "unknown_rate")
"""Settings of inference that the service uses."""


class ServeRun(SparkRun):
    """Parameters of the flow `serve`."""

    first_screen = (
        TABLES
        | MODEL_NAME
        | {name: ("serve", name) for name in ("host", "port", "num_workers", "challenger")}
        | {name: ("predict", name) for name in ANSWERING}
    )

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model to use; empty: the model trained from the table `images`"
    )
    predict: PredictConfig = PredictConfig()
    serve: ServeConfig = ServeConfig()

    @model_validator(mode="after")
    def _check_used(self) -> Self:
        if others := sorted(self.predict.model_dump(exclude_defaults=True).keys() - set(ANSWERING)):
            raise WrongInput(
                f"predict.{others[0]} is set, but the service predicts the images of requests, and uses only "
                f"{', '.join(ANSWERING)}",
                setting=f"predict.{others[0]}",
                way_out="leave it out",
            )
        return self


class LiveTestConfig(FrozenConfig):
    """The comparison of a challenger with the champion by their answers in service."""

    alpha: float = Field(
        0.05,
        gt=0.0,
        lt=1.0,
        description="Probability with which a challenger that is not better becomes the champion, however often it is "
        "looked at",
    )
    max_labels: int = Field(
        2000,
        ge=1,
        le=1_000_000,
        description="Labels after which a test without a decision ends, and the champion stays",
    )
    num_asked: int = Field(50, ge=1, le=1000, description="Images without a label that the report asks for")
    labels: Url | None = Field(
        None,
        description="Delta table or CSV file with late labels: the columns label and sha256, or label, request_id and "
        "image; empty: those of the table `feedback` alone",
    )
    decide: bool = Field(True, description="Whether a better challenger becomes the champion; false: it is only said")


class LiveTestRun(SparkRun):
    """Parameters of the flow `compare-live`."""

    first_screen = TABLES | MODEL_NAME | {name: ("live", name) for name in ("labels", "alpha", "max_labels", "decide")}

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model; empty: the model trained from the table `images`"
    )
    live: LiveTestConfig = LiveTestConfig()


class ExplainConfig(FrozenConfig):
    """Images whose predictions are explained by heat maps."""

    images: list[Url] = Field(
        default_factory=list,
        max_length=10_000,
        description="Files and folders of images, or the sha256 of images in the table `images`",
    )
    label: Text | None = Field(None, description="Class to explain; empty: the most probable one of each image")
    alias: str = Field(
        "champion", pattern=r"^[a-zA-Z_-]+$", description="Alias of the registered model version to explain"
    )
    max_images: int = Field(24, ge=1, le=1000, description="Maximum number of images that are explained")
    folder: Url | None = Field(None, description="Folder of the heat maps; empty: `explanations` in the home")


class ExplainRun(SparkRun):
    """Parameters of the flow `explain`."""

    first_screen = TABLES | MODEL_NAME | {name: ("explain", name) for name in ("images", "label", "folder")}

    promote: PromoteConfig = Field(
        PromoteConfig(), description="Registered model; empty: the model trained from the table `images`"
    )
    explain: ExplainConfig = ExplainConfig()
