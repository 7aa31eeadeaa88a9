"""Throughput, first batch, shuffle quality and memory of the loader, beside its peers.

Peers in the same run, on the same images of 224x224: the recipe (petastorm's own loader), torchvision's ImageFolder and
MosaicML Streaming under torch's DataLoader, and a gather from memory. Every loader has its own process and two workers,
and epochs alternate. MosaicML Streaming is installed into its own environment, and left out without a network.

Run: `make bench-loader`; BENCH_ARGS=--quick for two rounds on fewer images.
"""

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np

from tasks.cache.manifest import FORMAT, CacheFile, CacheManifest, CacheSplit, read_manifest
from tasks.cache.order import epoch_order
from tasks.cache.write import rows_per_group
from tasks.config.cache import CacheConfig
from tasks.refs import TableRef
from tests.benchmarks import loader_data
from tests.benchmarks.figures import Figure, rate_figure, write_figures
from tests.benchmarks.peers import Peer, install_beside, log_file

# Installed without dependencies: torch, numpy and PIL are of this environment, so that all decode in the same way.
STREAMING = [
    *("mosaicml-streaming==0.13.0", "transformers<5", "huggingface-hub<1", "tokenizers<0.23", "safetensors", "regex"),
    *(
        "brotli",
        "zstd",
        "xxhash",
        "python-snappy",
        "cramjam",
        "catalogue",
        "boto3",
        "botocore",
        "s3transfer",
        "jmespath",
    ),
    "tqdm",
]

OURS = ("uint8", "jpeg")


def write_data(folder: Path, num_rows: int, streaming: str | None, log: Any) -> None:
    """Write the same images in every format."""
    for pixel_format in OURS:
        loader_data.write_cache(str(folder / pixel_format), {"train": num_rows}, pixel_format)
    loader_data.write_image_folder(folder / "files", num_rows)
    loader_data.write_recipe(folder / "recipe", num_rows)
    (folder / "rows.json").write_text(json.dumps(num_rows))
    if streaming:
        program = (
            f"import sys; from pathlib import Path; sys.path.insert(0, {str(ROOT)!r}); "
            f"from tests.benchmarks import loader_data; "
            f"loader_data.write_mds(Path({str(folder / 'mds')!r}), {num_rows})"
        )
        subprocess.run([streaming, "-c", program], stdout=log, stderr=log, check=True)


def neighbour_correlation(rows: np.ndarray[Any, Any]) -> float:
    """Return the correlation of the row numbers of neighbours in the drawn order, in percent; 0 is best."""
    return float(100 * np.corrcoef(rows[:-1], rows[1:])[0, 1])


def shuffle_figure(num_rows: int) -> Figure:
    """Compare our order with a full permutation by the mean absolute correlation over ten epochs."""
    from tasks.cache.loader import CacheLoader

    with TemporaryDirectory() as scratch:
        # Empty files: the order needs only the counts, so that a large split costs nothing.
        settings = CacheConfig(image_size=loader_data.SIDE)
        in_group = rows_per_group(num_rows, settings)
        groups = -(-num_rows // in_group)
        file = CacheFile(name="x", rows=num_rows, row_groups=groups, bytes=0, sha256="")
        manifest = CacheManifest(
            format=FORMAT,
            table=TableRef(path="benchmark", version=0),
            content_digest="",
            settings=settings,
            classes=loader_data.CLASSES,
            splits={"train": CacheSplit(rows=num_rows, rows_per_group=in_group, files=(file,))},
        )
        window = CacheLoader(scratch, manifest, "train", 32, seed=1).window
    ours, full = [], []
    for epoch in range(10):
        ours.append(abs(neighbour_correlation(epoch_order(num_rows, in_group, window, 1, epoch).rows)))
        full.append(abs(neighbour_correlation(np.random.default_rng(epoch).permutation(num_rows))))
    mine, perfect = statistics.mean(ours), statistics.mean(full)
    name = f"correlation of neighbours, {num_rows} images"
    return Figure(name, mine, "%", "a full permutation", perfect, mine / perfect, None, None)


def memory_figure(small: Path, large: Path, log: Any) -> Figure:
    """Compare the memory growth of a process with our loader and a pool of 64 MB, at two data sizes."""
    grown, rows = [], []
    for folder in (large, small):
        peer = Peer("loader_peers.py", "small_pool", folder, log)
        grown.append([peer.run_round() for _ in range(2)][-1]["grown"])
        peer.close()
        manifest = read_manifest(str(folder / "uint8"))
        assert manifest is not None
        rows.append(manifest.splits["train"].rows)
    ratio = grown[0] / grown[1]
    return Figure(
        f"peak memory with a pool of 64 MB, {rows[0]} images",
        grown[0],
        "MB",
        f"{rows[1]} images",
        grown[1],
        ratio,
        1.1,
        ratio <= 1.1,
    )


def compare(rounds: dict[str, list[dict[str, float]]], mine: str, peer: str, title: str, goal: float | None) -> Figure:
    """Compare images per second with a peer; the ratio is the median over the rounds."""
    speeds = {name: [answer["images"] / answer["seconds"] for answer in rounds[name]] for name in (mine, peer)}
    return rate_figure(f"images/s, {mine}", "", title, list(zip(speeds[mine], speeds[peer], strict=True)), goal)


def main() -> None:
    """Write the data, run alternating epochs of the loaders, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds on fewer images")
    quick = parser.parse_args().quick
    num_rounds, num_rows = (2, 1000) if quick else (5, 4000)
    peers = ["uint8", "recipe", "gather", "jpeg", "image_folder"]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        log = stack.enter_context(log_file("loader").open("w"))
        streaming = install_beside(scratch / "streaming", STREAMING, "streaming", log)
        if streaming is None:
            print(f"MosaicML Streaming cannot be installed here and is left out: {log_file('loader')}", flush=True)
        else:
            peers += ["streaming_raw", "streaming_jpeg"]
        write_data(scratch / "data", num_rows, streaming, log)
        loader_data.write_cache(str(scratch / "large" / "uint8"), {"train": 4 * num_rows}, "uint8")
        running = []
        for name in peers:
            python = streaming if streaming and name.startswith("streaming") else sys.executable
            running.append(Peer("loader_peers.py", name, scratch / "data", log, python))
            stack.callback(running[-1].close)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
        for peer in running:
            peer.run_round()  # Warm-up: imports, workers, the page cache.
        for number in range(num_rounds):
            for peer in running:
                rounds[peer.name].append(peer.run_round())
            speeds = ", ".join(
                f"{name} {rounds[name][-1]['images'] / rounds[name][-1]['seconds']:.0f}" for name in peers
            )
            print(f"round {number + 1} of {num_rounds}, images/s: {speeds}", flush=True)
        for peer in running:
            peer.close()
        figures = [compare(rounds, "uint8", "recipe", "the recipe", 3.0)]
        if streaming:
            figures.append(compare(rounds, "uint8", "streaming_raw", "MosaicML Streaming, raw", 1.3))
            figures.append(compare(rounds, "jpeg", "streaming_jpeg", "MosaicML Streaming, JPEG", 1.3))
        figures.append(compare(rounds, "jpeg", "image_folder", "ImageFolder", 1.3))
        figures.append(compare(rounds, "jpeg", "recipe", "the recipe", None))
        figures.append(compare(rounds, "uint8", "gather", "gather from memory", None))
        firsts = {
            name: statistics.median(1000 * answer["first"] for answer in rounds[name]) for name in ("uint8", "recipe")
        }
        ratio = firsts["uint8"] / firsts["recipe"]
        holds = firsts["uint8"] <= 1000
        figures.append(
            Figure("first batch, warm", firsts["uint8"], "ms", "the recipe", firsts["recipe"], ratio, 1000, holds)
        )
        figures.append(shuffle_figure(50_000))
        figures.append(memory_figure(scratch / "data", scratch / "large", log))
    note = f"{num_rows} images of 224x224, batch 32, 2 workers, median of {num_rounds} rounds"
    write_figures("loader", figures, note if streaming else f"{note}; MosaicML Streaming could not be installed")


if __name__ == "__main__":
    main()
