"""The patches of Horovod's sources, and the key of the wheels that are built from them."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
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


def source_build(cache: Path, command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command after build_horovod.sh was sourced, as setup.sh does."""
    script = (
        f"set -euo pipefail; python={sys.executable} cache={cache}; . deployments/setup/build_horovod.sh; {command}"
    )
    without_choice = {name: value for name, value in os.environ.items() if name != "HOROVOD_GPU_OPERATIONS"}
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=without_choice | environment, capture_output=True, text=True, check=False
    )


def test_a_wheel_is_used_by_the_versions_that_it_was_built_for(tmp_path: Path) -> None:
    """The key has the number of the patches, torch's version, Python's and the variant."""
    for variant, environment in (("cpu", {}), ("nccl", {"HOROVOD_GPU_OPERATIONS": "NCCL"})):
        done = source_build(
            tmp_path,
            "echo $wheels $patch; find_wheel; mkdir -p $wheels; touch $wheels/horovod-1.whl; find_wheel",
            **environment,
        )
        folder, patch, wheel = done.stdout.split()
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        torch_version = version("torch")
        assert Path(folder).parent == tmp_path / "wheels"
        assert Path(folder).name == f"horovod-0.28.1-patch{patch}-torch-{torch_version}-{python}-x86_64-{variant}"
        assert Path(wheel) == Path(folder, "horovod-1.whl")
    for name in ("Dockerfile.cpu", "Dockerfile.gpu"):
        assert " deployments/setup/patch_horovod.py " in (ROOT / "docker" / name).read_text()


def test_machine_with_a_gpu_builds_with_nccl(tmp_path: Path) -> None:
    """A driver that finds no GPU is none, and CPU builds without NCCL on any machine."""
    tool = tmp_path / "nvidia-smi"

    def variant(**environment: str) -> str:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = source_build(tmp_path, "echo $variant ${HOROVOD_GPU_OPERATIONS:-unset}", **{"PATH": path} | environment)
        return done.stdout

    for output, status, expected in (
        ("GPU 0: NVIDIA H200 (UUID: GPU-8932f937)", 0, "nccl NCCL\n"),
        ("No devices found.", 6, "cpu unset\n"),
        ("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", 9, "cpu unset\n"),
    ):
        tool.write_text(f"#!/bin/sh\necho '{output}'; exit {status}\n")
        tool.chmod(0o755)
        assert variant() == expected
        assert variant(HOROVOD_GPU_OPERATIONS="cpu") == "cpu unset\n"
    assert variant(HOROVOD_GPU_OPERATIONS="NCCL") == "nccl NCCL\n"


def test_choice_is_remembered_where_its_wheel_is_installed_already(tmp_path: Path) -> None:
    """Without it, the next set-up beside a GPU would build with NCCL."""
    command = f"remembered={tmp_path}/variant; step() {{ :; }}; install_horovod; cat $remembered"
    assert source_build(tmp_path, command, HOROVOD_GPU_OPERATIONS="CPU").stdout == "CPU\n"


def test_lock_has_nvcc_of_the_cuda_version_of_torch() -> None:
    """The build for GPUs takes nvcc from the lock file; another version may not compile torch's headers."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    versions = {package["name"]: package["version"] for package in lock["package"] if "version" in package}
    assert torch.version.cuda is not None
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-cccl", "nvidia-cuda-runtime"):
        assert versions[name].startswith(f"{torch.version.cuda}."), name


def test_unknown_operations_are_refused() -> None:
    """Set-up ends before its first step: only NCCL is built for GPUs."""
    done = source_build(Path("/unused"), "echo on", HOROVOD_GPU_OPERATIONS="MPI")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "HOROVOD_GPU_OPERATIONS is 'MPI': set it to NCCL or CPU, or unset it\n"
