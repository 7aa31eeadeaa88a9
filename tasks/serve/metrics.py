"""The figures of a service for Prometheus, summed over its workers."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the buckets of a duration, in seconds, and of the images of a batch."""


class Metrics:
    """The figures of a worker.

    prometheus-client keeps them in files of the folder $PROMETHEUS_MULTIPROC_DIR, if it is set when it is imported.
    """

    def __init__(self) -> None:
        own = CollectorRegistry()
        prefix = "lakevision_serve"
        self.requests = Counter(f"{prefix}_requests", "Requests by path and status", ["path", "status"], registry=own)
        self.seconds = Histogram(
            f"{prefix}_seconds", "Time from the arrival of a request to its answer", buckets=SECONDS, registry=own
        )
        self.images = Counter(
            f"{prefix}_images", "Images by version and outcome (label, unknown, unsure, error)", ["version", "outcome"],
            registry=own,
        )  # fmt: skip
        self.batch = Histogram(f"{prefix}_batch_images", "Images of a batch", buckets=SIZES, registry=own)
        self.version = Gauge(
            f"{prefix}_version", "Loaded version by alias", ["alias"], registry=own, multiprocess_mode="mostrecent"
        )
        self.lost = Counter(
            f"{prefix}_lost_rows", "Answers that were not logged, since the disk was full", registry=own
        )
        self._registry = own

    def text(self, folder: str | None) -> tuple[bytes, str]:
        """Return the figures of all workers as text, and its content type.

        Args:
            folder: Folder of their files; None for the figures of this process alone.
        """
        registry = self._registry
        if folder is not None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]  # it has no types
        return generate_latest(registry), CONTENT_TYPE_LATEST
