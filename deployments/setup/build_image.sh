#!/usr/bin/env bash
# Build an image, and run a minimal DAG in it.
# The DAG runs as the image's own user and, where possible, without network access. It needs no GPU.
# VARIANT=gpu builds the GPU image in place of the CPU image; BASE=... sets the base image, IMAGE=... the image's name.
# Arguments are passed to the build: --network host, --pull ...
set -euo pipefail
cd "$(dirname "$0")/../.."

variant=${VARIANT:-cpu}
image=${IMAGE:-lakevision:$variant}
say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() {
    printf 'build_image: %s\n' "$*" >&2
    exit 1
}

[ "$variant" = cpu ] || [ "$variant" = gpu ] || fail "VARIANT is '$variant': set it to cpu or gpu"

if docker info >/dev/null 2>&1; then
    engine=docker
elif command -v buildah >/dev/null; then
    engine=buildah
    # chroot needs nothing but root; oci, buildah's default, needs namespaces and a runtime.
    export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
else
    fail "no docker engine answers and buildah is not on PATH: start docker, or install buildah (Debian, Ubuntu: apt-get install buildah)"
fi

# The code version that runs in the image record: the commit, with a suffix if files were changed since.
commit=$(git rev-parse --quiet --verify HEAD 2>/dev/null || true)
if [ -n "$commit" ] && [ -n "$(git status --porcelain)" ]; then
    commit=$commit-dirty
fi

build=(--file "docker/Dockerfile.$variant" --tag "$image" --build-arg "LAKEVISION_CODE_VERSION=$commit")
[ -z "${BASE:-}" ] || build+=(--build-arg "BASE=$BASE")

say "Building $image with $engine"
case $engine in
docker) DOCKER_BUILDKIT=1 docker build "${build[@]}" "$@" . ;;
buildah) buildah build --layers --force-rm "${build[@]}" "$@" . ;;
esac

# Small images, random initial weights (no download), one epoch, also in two ranks: every stage of the DAG within minutes.
smallest=(
    python -m flows.pipeline
    --cache.image_size 16
    --train.model resnet18 --train.weights none --train.freeze_backbone false --train.max_epochs 1
    --train_on both --distributed.num_ranks 2
)

# Spark resolves its machine's host name; without a network, localhost is the only name that resolves.
say "Running in $image: ${smallest[*]}"
case $engine in
docker)
    docker run --rm --init --network none --hostname localhost "$image" "${smallest[@]}"
    size=$(docker image inspect --format '{{.Size}}' "$image" | numfmt --to=si)B
    ;;
buildah)
    container=$(buildah from "$image")
    trap 'buildah rm "$container" >/dev/null' EXIT
    offline=()
    # Without a runtime the container shares this machine's network; root can detach it.
    if [ "$(id -u)" = 0 ] && unshare --net ip link set lo up 2>/dev/null; then
        offline=(unshare --net sh -c 'ip link set lo up && exec "$@"' sh)
    else
        say "The run has access to this machine's network: to detach it, root, unshare and ip are needed"
    fi
    "${offline[@]}" buildah run --hostname localhost "$container" -- "${smallest[@]}"
    size=$(buildah images --format '{{.Size}}' "$image")
    ;;
esac
say "$image ($size) was built on ${BASE:-the default base} and ran the DAG"
