"""The patches of Horovod's sources, and the key of the wheels that are built from them."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

from deployments.setup.patch_horovod import PATCHES
from tests.builders.processes import ROOT


def write_sources(folder: Path) -> None:
    """Write files with the texts that are replaced, each once."""
    for name, old, _new in PATCHES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as sources:
            sources.write(f"before\n  {old}\nafter\n")


def run_patch(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Patch a folder as the build does."""
    command = [sys.executable, "deployments/setup/patch_horovod.py", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_sources_are_patched(tmp_path: Path) -> None:
    """The text is replaced in each file, and nothing else."""
    write_sources(tmp_path)
    done = run_patch(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for patched in {name for name, _old, _new in PATCHES}:
        expected = "".join(f"before\n  {new}\nafter\n" for name, _old, new in PATCHES if name == patched)
        assert (tmp_path / patched).read_text() == expected


def test_build_fails_if_the_text_to_patch_is_not_found(tmp_path: Path) -> None:
    """Other sources need other patches; the sentence names file and text."""
    write_sources(tmp_path)
    name, old, _new = PATCHES[-1]
    (tmp_path / name).write_text("something else")
    done = run_patch(tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"patch_horovod: '{name}' does not have '{old}': adapt PATCHES in "
        "deployments/setup/patch_horovod.py to this version of Horovod\n"
    )


def test_wheels_of_older_patches_are_not_used() -> None:
    """The patch number is in the key, and set-up looks for a wheel with it before it asks for a compiler."""
    build, setup = ((ROOT / "deployments/setup" / name).read_text() for name in ("build_horovod.sh", "setup.sh"))
    assert re.search(r"^patch=\d+$", build, re.MULTILINE)
    assert 'f"horovod-$version-patch$patch-torch-' in build
    assert "wheels/horovod-*-patch$horovod_patch-torch-$torch_version-*-cpu/" in setup
    for name in ("Dockerfile.cpu", "Dockerfile.gpu"):
        assert " deployments/setup/patch_horovod.py " in (ROOT / "docker" / name).read_text()


def test_lock_has_nvcc_of_the_cuda_version_of_torch() -> None:
    """The build for GPUs takes nvcc from the lock file; another version may not compile torch's headers."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    versions = {package["name"]: package["version"] for package in lock["package"] if "version" in package}
    assert torch.version.cuda is not None
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-cccl", "nvidia-cuda-runtime"):
        assert versions[name].startswith(f"{torch.version.cuda}."), name


def test_unknown_operations_are_refused() -> None:
    """Only NCCL is built for GPUs."""
    done = subprocess.run(
        ["deployments/setup/build_horovod.sh"],
        cwd=ROOT,
        env=os.environ | {"HOROVOD_GPU_OPERATIONS": "MPI"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "HOROVOD_GPU_OPERATIONS is 'MPI': set it to NCCL, or unset it for a CPU build\n"
