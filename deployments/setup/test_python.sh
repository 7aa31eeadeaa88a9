#!/usr/bin/env bash
# Run set-up, lint, types, unit tests and the DAG on the digits with another Python, in a root of its Debian release.
# `make test-python PYTHON=3.13` makes the root once and keeps it in the user's cache, with all that set-up adds.
# Everything runs in namespaces: mounts and processes end with this script, also where it is interrupted or killed.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deployments/setup/step.sh

fail() {
    printf 'test_python: %s\n' "$*" >&2
    exit 1
}

python=${1:-}
case $python in
3.11) release=bookworm ;;
3.13) release=trixie ;;
3.12) fail "no Debian release has Python 3.12: .github/workflows/test.yml tests it, on Ubuntu. Set PYTHON to 3.11 or 3.13" ;;
*) fail "PYTHON is '$python': set it to 3.11 (Debian 12) or 3.13 (Debian 13)" ;;
esac
roots=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}/roots
root=$roots/$release

if [ "${2:-}" != in-namespaces ]; then
    [ "$(id -u)" = 0 ] || fail "making a root of Debian needs the rights of root: sudo make test-python PYTHON=$python"
    command -v debootstrap >/dev/null || fail "debootstrap is not on PATH: install it (Debian, Ubuntu: apt-get install debootstrap)"
    namespaces=(unshare --mount --pid --fork --kill-child --mount-proc)
    "${namespaces[@]}" true || fail "this machine allows no namespaces of mounts and processes: use one that does, or a privileged container"
    mkdir -p "$roots"
    # If two checkouts use the same root, one waits.
    exec 9>"$roots/.$release.lock"
    flock 9
    exec "${namespaces[@]}" deployments/setup/test_python.sh "$python" in-namespaces
fi
# The first process of a namespace ignores the signals that it has no trap for.
trap 'exit 130' INT TERM

make_root() {
    # The machine's own mirror of Debian, where it has one.
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m 1 -E '/debian/?$' || true)
    rm -rf --one-file-system "$root.partial"
    debootstrap --variant=minbase --include=ca-certificates,git,make,openssh-server,python3 \
        "$release" "$root.partial" "${mirror:-http://deb.debian.org/debian}"
    # The certificates of the machine's site, also for Java.
    if [ -d /usr/local/share/ca-certificates ]; then
        cp -r /usr/local/share/ca-certificates "$root.partial/usr/local/share"
        chroot "$root.partial" update-ca-certificates
    fi
    mv "$root.partial" "$root"
}
[ -d "$root" ] || step "root of Debian $release (kept in $root)" make_root

# bind PATH OPTION: give the root a file or folder of the machine, at the same path, to read (ro) or to write to (rw).
bind() {
    if [ -d "$1" ]; then mkdir -p "$root$1"; elif [ ! -e "$root$1" ]; then mkdir -p "$root${1%/*}" && touch "$root$1"; fi
    mount --bind -o "$2" "$1" "$root$1"
}
# A mount of its own, so that the table of mounts has its `/` in it, as on a machine.
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
bind /etc/hosts ro
bind /etc/resolv.conf ro

# Downloads are shared with the machine, and copied: a hard link cannot leave a mount.
export UV_CACHE_DIR=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/uv} UV_LINK_MODE=copy
mkdir -p "$UV_CACHE_DIR"
bind "$UV_CACHE_DIR" rw
environment=(HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" PATH=/usr/sbin:/usr/bin:/sbin:/bin LAKEVISION_PYTHON="$python")
for name in $(compgen -e | grep -E '^(PIP|UV)_|^SSL_CERT_FILE$|_CA_BUNDLE$|_(proxy|PROXY)$' | grep -vE '^UV_(PROJECT|PYTHON)'); do
    environment+=("$name=${!name}")
    if [[ ${!name} == /* && -e ${!name} && $name != UV_CACHE_DIR ]]; then bind "${!name}" ro; fi
done

# A clone of the last commit; .venv stays from the run before.
[ -z "$(git status --porcelain)" ] || echo "Changes that are not committed are not tested"
checkout=$root/lakevision
git init --quiet "$checkout"
git -C "$checkout" fetch --quiet "$PWD" HEAD
git -C "$checkout" checkout --quiet --force --detach FETCH_HEAD
git -C "$checkout" clean --quiet -ffdx --exclude=.venv

chroot "$root" env -i "${environment[@]}" make -C /lakevision test core=tests/e2e/test_digits.py
