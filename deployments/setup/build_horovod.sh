#!/usr/bin/env bash
# Build a patched Horovod wheel once, keep it in the user's cache, and install it into .venv.
# The patches of the last release (0.28.1) are in deployments/setup/patch_horovod.py.
# HOROVOD_GPU_OPERATIONS=NCCL builds for GPUs, on any machine; without it the wheel is for CPU tensors over Gloo.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deployments/setup/step.sh

version=0.28.1
# Part of the wheel's key: increment it with each change of the patches, so that older wheels are built again.
patch=3
sdist_sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
python=$PWD/.venv/bin/python
cache=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}
# A GPU build stays the choice of this checkout, also where the next `make` does not set the variable.
remembered=.venv/.horovod-variant
if [ -z "${HOROVOD_GPU_OPERATIONS:-}" ] && [ -e "$remembered" ]; then
    HOROVOD_GPU_OPERATIONS=$(cat "$remembered")
    export HOROVOD_GPU_OPERATIONS
fi
variant=$(echo "${HOROVOD_GPU_OPERATIONS:-cpu}" | tr '[:upper:]' '[:lower:]')
key=$("$python" - <<PY
import platform, sys
from importlib.metadata import version
print(f"horovod-$version-patch$patch-torch-{version('torch')}-cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}-$variant")
PY
)
wheels=$cache/wheels/$key
stamp=.venv/.horovod-$key

find_wheel() { find "$wheels" -maxdepth 1 -name 'horovod-*.whl' 2>/dev/null | head -n 1; }

if [ "$variant" != cpu ] && [ "$variant" != nccl ]; then
    echo "HOROVOD_GPU_OPERATIONS is '$HOROVOD_GPU_OPERATIONS': set it to NCCL, or unset it for a CPU build" >&2
    exit 1
fi

mkdir -p "$wheels"
# If two checkouts need the same wheel, one builds it and the other waits.
exec 9>"$wheels/.lock"
flock 9
wheel=$(find_wheel)

# Use nvcc, CUDA and NCCL of the lock file, which are those that torch loads, and not of the machine, whose version may
# differ. The packages lack some names that a toolkit has.
use_cuda_packages() {
    uv sync --quiet --locked --inexact --group build-nccl
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    ln -sfn lib "$packages/cu13/lib64"
    ln -sf libcudart.so.13 "$packages/cu13/lib/libcudart.so"
    ln -sf libnccl.so.2 "$packages/nccl/lib/libnccl.so"
    PATH=$packages/cu13/bin:$PATH
    export CUDA_HOME=$packages/cu13 HOROVOD_CUDA_HOME=$packages/cu13
    export HOROVOD_NCCL_HOME=$packages/nccl HOROVOD_NCCL_LINK=SHARED
    wanted=$("$python" -c 'import torch; print(torch.version.cuda)')
    if ! nvcc --version | grep -F "release $wanted,"; then
        echo "torch is built for CUDA $wanted: set the versions of the group build-nccl in pyproject.toml to it" >&2
        return 1
    fi
}

build_wheel() {
    uv sync --quiet --locked --inexact --group build
    if [ "$variant" = nccl ]; then use_cuda_packages; fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo "horovod==$version --hash=sha256:$sdist_sha256" >"$work/requirements.txt"
    "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: --require-hashes \
        -r "$work/requirements.txt" -d "$work"
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    "$python" deployments/setup/patch_horovod.py "$work/horovod-$version"
    # GCC 13 no longer includes cstdint implicitly (horovod#3957).
    PATH=$PWD/.venv/bin:$PATH HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 MAKEFLAGS=-j$(nproc) CXXFLAGS="-include cstdint ${CXXFLAGS:-}" \
        "$python" -m pip wheel --no-deps --no-build-isolation --verbose -w "$work/wheel" "$work/horovod-$version"
    # Renamed at the end, so that a partially written wheel is never found.
    cp "$work"/wheel/horovod-*.whl "$wheels/.partial"
    mv "$wheels/.partial" "$wheels/$(basename "$work"/wheel/horovod-*.whl)"
}
if [ -z "$wheel" ]; then
    step "Horovod $version for $variant (built once, about 4 minutes on 2 cores)" build_wheel
    wheel=$(find_wheel)
fi

install_wheel() {
    rm -f .venv/.horovod-*
    uv pip install --python "$python" --no-deps --reinstall "$wheel"
    "$python" -c 'import horovod.torch as hvd; assert hvd.gloo_built(), "Horovod was built without Gloo"'
    touch "$stamp"
    if [ -n "${HOROVOD_GPU_OPERATIONS:-}" ]; then echo "$HOROVOD_GPU_OPERATIONS" >"$remembered"; fi
}
if [ ! -e "$stamp" ] || ! "$python" -c 'import horovod' 2>/dev/null; then
    step "Horovod's wheel into .venv" install_wheel
fi
