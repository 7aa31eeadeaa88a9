#!/usr/bin/env bash
# Set up a fresh machine: system packages, uv, .venv from the lock file, Horovod and Delta's jars.
# Each step runs once and prints one line. Horovod is built while packages are downloaded.
# Arguments are passed to `uv sync` (images pass --no-dev).
set -euo pipefail
cd "$(dirname "$0")/../.."
. deployments/setup/step.sh

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    echo "setup: $(uname -s) $(uname -m) is not a tested platform (Linux x86_64 is): continuing, but Horovod may not build"
fi

cache=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}
mkdir -p "$cache"

python=$(deployments/setup/find_python.sh)
. deployments/setup/build_horovod.sh

# --- system packages: Java for Spark, a compiler and Python's headers for Horovod, venv for uv ---------------------
java_of() { if [ -n "${JAVA_HOME:-}" ]; then echo "$JAVA_HOME/bin/java"; else echo java; fi; }
has_java() { "$(java_of)" -version 2>&1 | grep -qE 'version "(17|21)[."]'; }
has_compiler() { command -v c++ >/dev/null || command -v g++ >/dev/null; }
has_headers() { "$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'; }
# The oldest uv that can read the lock file; the version that set-up installs is in deployments/setup/uv.txt.
oldest_uv=0.9.0
new_enough() { [ "$(printf '%s\n' "$oldest_uv" "$1" | sort -V | head -n 1)" = "$oldest_uv" ]; }
uv_on_path() { local version && version=$(uv --version 2>/dev/null) && new_enough "$(cut -d' ' -f2 <<<"$version")"; }
uv_requirement=$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' deployments/setup/uv.txt)
own_uv=$cache/uv/.installed-${uv_requirement#uv==}
# Where `make` runs this script, set-up's own uv is on PATH as well.
other_uv() { uv_on_path && ! [[ $(command -v uv) -ef $cache/uv/bin/uv ]]; }
has_uv() { other_uv || [ -e "$own_uv" ]; }
has_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

missing=()
# Java 17 in Debian 12, 21 in Debian 13 and Ubuntu 24.04.
has_java || missing+=(default-jre-headless)
if [ -z "$(find_wheel)" ]; then
    has_compiler || missing+=(g++)
    has_headers || missing+=(python$python_version-dev)
fi
has_uv || has_venv || missing+=(python$python_version-venv)
if [ ${#missing[@]} -gt 0 ]; then
    command="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
    if [ -n "${JAVA_HOME:-}" ] && ! has_java; then
        fail "JAVA_HOME is $JAVA_HOME, which is not Java 17 or 21: point it at one, or unset it"
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        install_packages() {
            export DEBIAN_FRONTEND=noninteractive
            apt-get update -q
            apt-get install -y -q --no-install-recommends "${missing[@]}"
        }
        step "system packages (${missing[*]})" install_packages
    else
        fail "missing: ${missing[*]}. Run this, then repeat your command: sudo sh -c '$command'"
    fi
    has_java || fail "Java 17 or 21 is still missing: java -version prints '$("$(java_of)" -version 2>&1 | head -n 1)'"
fi

# --- uv, from PyPI, in its own folder --------------------------------------------------------------------------------
if ! other_uv; then
    if [ ! -e "$own_uv" ]; then
        install_uv() {
            rm -f "$cache"/uv/.installed-*
            "$python" -m venv --clear "$cache/uv" # another checkout may have made it with a Python that is gone
            "$cache/uv/bin/pip" install --disable-pip-version-check --require-hashes --only-binary :all: -r deployments/setup/uv.txt
            touch "$own_uv"
        }
        step "uv (${uv_requirement#uv==}, verified by hash)" install_uv
    fi
    PATH=$cache/uv/bin:$PATH
fi

# --- .venv from the lock, and Horovod beside it ----------------------------------------------------------------------
start_horovod
synced=.venv/.synced-$(cat uv.lock pyproject.toml | sha256sum | cut -c1-16)
if [ ! -e "$synced" ]; then
    # Otherwise each process would compile torch's modules again, ten seconds of work.
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then export UV_COMPILE_BYTECODE=1; fi
    # --inexact: Horovod is not in the lock file and must not be removed.
    step "packages (.venv from uv.lock; the first run downloads about 4 GB)" \
        uv sync --locked --inexact --python "$python" "$@"
    rm -f .venv/.synced-*
    touch "$synced"
fi

install_horovod

# --- Delta's jars ----------------------------------------------------------------------------------------------------
if ! .venv/bin/python -m deployments.setup.fetch_jars --check; then
    step "Delta's jars (verified by hash)" .venv/bin/python -m deployments.setup.fetch_jars
fi
