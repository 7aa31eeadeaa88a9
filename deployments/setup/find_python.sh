#!/usr/bin/env bash
# Print the path of the Python for .venv: the one it has, else LAKEVISION_PYTHON, else the first suitable one on PATH.
set -euo pipefail
cd "$(dirname "$0")/../.."

# In the order in which they are looked for, after python3; pyproject.toml has the same in requires-python.
versions=(3.13 3.12 3.11)
cache=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}
# A command may be on PATH and not run, as the shims of pyenv do for versions that are not activated.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_suitable() { [[ " ${versions[*]} " == *" $1 "* ]]; }

named=${LAKEVISION_PYTHON:-}
[[ ! $named =~ ^3\.[0-9]+$ ]] || named=python$named
if [ -n "$named" ]; then
    named_version=$(version_of "$named")
    is_suitable "$named_version" ||
        fail "LAKEVISION_PYTHON is '$LAKEVISION_PYTHON' (${named_version:-does not run}): set it to one of ${versions[*]} or to the path of such a Python, or unset it"
fi

# The Python of an existing .venv stays, so that a later command does not install all packages again.
if [ -e .venv/pyvenv.cfg ]; then
    version=$(version_of .venv/bin/python)
    [ -n "$version" ] ||
        fail "the Python of .venv does not run, perhaps because it was uninstalled: remove .venv (rm -r .venv) and repeat your command"
    is_suitable "$version" ||
        fail ".venv has Python $version, not one of ${versions[*]}: remove it (rm -r .venv) and repeat your command"
    [ "${named_version:-$version}" = "$version" ] ||
        fail ".venv has Python $version and LAKEVISION_PYTHON is '$LAKEVISION_PYTHON': unset LAKEVISION_PYTHON, or remove .venv (rm -r .venv) and repeat your command"
    named=.venv/bin/python
fi

if [ -z "$named" ]; then
    found=()
    while read -r candidate; do
        # Where `make` runs this script, set-up's own uv is on PATH, and beside it the Python that installed it.
        [ ! "${candidate%/*}" -ef "$cache/uv/bin" ] || continue
        version=$(version_of "$candidate")
        found+=("$candidate (${version:-does not run})")
        is_suitable "$version" || continue
        named=$candidate
        break
    done < <(type -aP python3 "${versions[@]/#/python}" || true)
    [ -n "$named" ] ||
        fail "no Python of the versions ${versions[*]} is on PATH; found: $(printf '%s, ' "${found[@]:-none}" | sed 's/, $//'). Install one (Debian 12 and 13, Ubuntu 24.04: apt-get install python3), or set LAKEVISION_PYTHON to its path"
fi
"$named" -c 'import sys; print(sys.executable)'
