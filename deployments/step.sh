# Sourced: one line for each step of set-up, with its time; what the step prints goes to a log of its own.

setup_logs=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}/logs

# step NAME COMMAND...: run a command or function; when it fails, name its log, show the end of it, and exit.
# Not for use in a condition: there bash ignores `set -e`, also within functions.
step() {
    local name=$1 status started=$SECONDS log
    shift
    mkdir -p "$setup_logs"
    find "$setup_logs" -name '*.log' -mtime +30 -delete
    log=$setup_logs/$(date +%Y%m%d-%H%M%S)-$$-$(tr -cs '[:alnum:]\n' - <<<"${name%% (*}" | tr '[:upper:]' '[:lower:]').log
    printf '\033[1m==>\033[0m %s ... ' "$name"
    set +e
    (
        set -e
        "$@"
    ) >"$log" 2>&1 </dev/null
    status=$?
    set -e
    if [ "$status" -ne 0 ]; then
        printf 'failed after %d s\n' $((SECONDS - started))
        printf 'setup: %s failed; the whole log is %s, its end:\n' "$name" "$log" >&2
        tail -n 12 "$log" | sed 's/^/    /' >&2
        exit "$status"
    fi
    printf '%d s\n' $((SECONDS - started))
}
