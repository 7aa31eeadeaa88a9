# Functions, sourced by setup.sh, that build a patched Horovod wheel once, keep it in the user's cache, and install it.
# The patches of the last release (0.28.1) are in deployments/setup/patch_horovod.py.
# The wheel is for GPUs (NCCL) where the machine has one, else for CPU tensors over Gloo. HOROVOD_GPU_OPERATIONS=NCCL
# builds for GPUs on any machine, CPU for none.

horovod_version=0.28.1
# Part of the wheel's key: increment it with each change of the patches, so that older wheels are built again.
patch=4
sdist_sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
torch_version=$(awk '/^name = "torch"$/ { getline; gsub(/"/, ""); print $3 }' uv.lock)

# A choice stays that of this checkout, also where the next `make` does not set the variable. So does a GPU build: a
# machine without GPUs may share the checkout.
remembered=.venv/.horovod-variant
operations=${HOROVOD_GPU_OPERATIONS:-}
if [ -z "$operations" ] && [ -e "$remembered" ]; then operations=$(cat "$remembered"); fi
if [ -z "$operations" ] && [[ $(nvidia-smi -L 2>/dev/null) == *"GPU "* ]]; then operations=NCCL; fi
variant=$(echo "${operations:-cpu}" | tr '[:upper:]' '[:lower:]')
case $variant in
    nccl) export HOROVOD_GPU_OPERATIONS=NCCL ;;
    cpu) unset HOROVOD_GPU_OPERATIONS ;;
    *)
        echo "HOROVOD_GPU_OPERATIONS is '$operations': set it to NCCL or CPU, or unset it" >&2
        exit 1
        ;;
esac

python_version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
horovod_key=horovod-$horovod_version-patch$patch-torch-$torch_version-cp${python_version/./}-$(uname -m)-$variant
wheels=$cache/wheels/$horovod_key

find_wheel() { compgen -G "$wheels/horovod-*.whl" || true; }

# The build has an environment of its own, $work/venv, so that it can run while `uv sync` writes .venv. Its files are
# links into uv's cache. For the CPU it has torch's headers and libraries without the packages that torch needs to be
# imported, which are most of the download.
prepare_build() {
    export UV_PROJECT_ENVIRONMENT=$work/venv UV_LINK_MODE=symlink
    if [ "$variant" = nccl ]; then
        uv sync --locked --no-compile-bytecode --python "$python" --only-group build --only-group build-nccl
    else
        uv sync --locked --no-compile-bytecode --python "$python" --only-group build
        uv export --quiet --locked --no-annotate --no-header --only-group build-nccl >"$work/exported.txt"
        sed -n '/^torch==/,/[^\\]$/p' "$work/exported.txt" >"$work/torch.txt"
        uv pip install --no-compile-bytecode --python "$work/venv" --no-deps --require-hashes -r "$work/torch.txt"
    fi
}

# Use nvcc, CUDA and NCCL of the lock file, which are those that torch loads, and not of the machine, whose version may
# differ. The packages lack some names that a toolkit has.
use_cuda_packages() {
    packages=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    ln -sfn lib "$packages/cu13/lib64"
    ln -sf libcudart.so.13 "$packages/cu13/lib/libcudart.so"
    ln -sf libnccl.so.2 "$packages/nccl/lib/libnccl.so"
    PATH=$packages/cu13/bin:$PATH
    export CUDA_HOME=$packages/cu13 HOROVOD_CUDA_HOME=$packages/cu13
    export HOROVOD_NCCL_HOME=$packages/nccl HOROVOD_NCCL_LINK=SHARED
    wanted=$("$1" -c 'import torch; print(torch.version.cuda)')
    if ! nvcc --version | grep -F "release $wanted,"; then
        echo "torch is built for CUDA $wanted: set the versions of the group build-nccl in pyproject.toml to it" >&2
        return 1
    fi
}

build_wheel() {
    mkdir -p "$wheels"
    # If two checkouts need the same wheel, one builds it and the other waits.
    exec 9>"$wheels/.lock"
    flock 9
    if [ -n "$(find_wheel)" ]; then return; fi
    local python=$work/venv/bin/python
    PATH=$work/venv/bin:$PATH
    if [ "$variant" = nccl ]; then use_cuda_packages "$python"; fi
    echo "horovod==$horovod_version --hash=sha256:$sdist_sha256" >"$work/requirements.txt"
    "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: --require-hashes \
        -r "$work/requirements.txt" -d "$work"
    tar -xzf "$work/horovod-$horovod_version.tar.gz" -C "$work"
    "$python" deployments/setup/patch_horovod.py "$work/horovod-$horovod_version"
    # Ninja, unlike make, compiles Horovod's sources while Gloo's are not ready.
    TMPDIR=$work CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --no-deps --no-build-isolation --verbose -w "$work/wheel" "$work/horovod-$horovod_version"
    # Renamed at the end, so that a partially written wheel is never found.
    cp "$work"/wheel/horovod-*.whl "$wheels/.partial"
    mv "$wheels/.partial" "$wheels/$(basename "$work"/wheel/horovod-*.whl)"
}

# Start the build, if there is no wheel yet; await_horovod waits for it.
start_horovod() {
    if [ -n "$(find_wheel)" ]; then return; fi
    work=$(mktemp -d)
    trap 'stop_started_step; rm -rf "$work"' EXIT
    step "torch and the tools of Horovod's build" prepare_build
    start_step "Horovod $horovod_version for $variant (built once, a minute on 2 idle cores)" build_wheel
}

install_wheel() {
    rm -f .venv/.horovod-*
    uv pip install --python .venv/bin/python --no-deps --reinstall "$(find_wheel)"
    .venv/bin/python -c 'import horovod.torch as hvd; assert hvd.gloo_built(), "Horovod was built without Gloo"'
    touch ".venv/.$horovod_key"
}

install_horovod() {
    if [ -n "${started_pid:-}" ]; then await_step; fi
    if [ ! -e ".venv/.$horovod_key" ] || ! .venv/bin/python -c 'import horovod' 2>/dev/null; then
        step "Horovod's wheel into .venv" install_wheel
    fi
    # Also where the wheel was installed before: by default, then, and now by choice.
    if [ -n "$operations" ]; then echo "$operations" >"$remembered"; fi
}
