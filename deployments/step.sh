# Sourced: one line for each step of set-up, with its time; what the step prints goes to a log of its own.
# LAKEVISION_STEP_LOG=- shows it instead: in an image build, where the log of a step that fails is gone with its layer.

setup_logs=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}/logs

# run_step NAME COMMAND...: run a command or function; its exit status is in $step_status, its log in $step_log.
# Not for use in a condition: there bash ignores `set -e`, also within functions.
run_step() {
    local name=$1
    shift
    step_started=$SECONDS
    if [ "${LAKEVISION_STEP_LOG:-}" = - ]; then
        step_log="above"
        printf '\033[1m==>\033[0m %s\n' "$name"
        set +e
        (
            set -e
            "$@"
        ) </dev/null
        step_status=$?
        printf '\033[1m==>\033[0m %s ... ' "$name"
    else
        mkdir -p "$setup_logs"
        find "$setup_logs" -name '*.log' -mtime +30 -delete
        step_log=$setup_logs/$(date +%Y%m%d-%H%M%S)-$$-$(tr -cs '[:alnum:]\n' - <<<"${name%% (*}" | tr '[:upper:]' '[:lower:]').log
        printf '\033[1m==>\033[0m %s ... ' "$name"
        set +e
        (
            set -e
            "$@"
        ) >"$step_log" 2>&1 </dev/null
        step_status=$?
    fi
    set -e
}

# step NAME COMMAND...: run one step; when it fails, name its log, show the end of it, and exit.
step() {
    run_step "$@"
    if [ "$step_status" -ne 0 ]; then
        printf 'failed after %d s\n' $((SECONDS - step_started))
        printf 'setup: %s failed; the whole log is %s' "$1" "$step_log" >&2
        if [ "$step_log" = above ]; then
            printf '\n' >&2
        else
            printf ', its end:\n' >&2
            tail -n 12 "$step_log" | sed 's/^/    /' >&2
        fi
        exit "$step_status"
    fi
    printf '%d s\n' $((SECONDS - step_started))
}

# optional_step NAME WITHOUT COMMAND...: run a step that set-up can do without; when it fails, say what that means, and go on.
optional_step() {
    local name=$1 without=$2
    shift 2
    run_step "$name" "$@"
    if [ "$step_status" -eq 0 ]; then
        printf '%d s\n' $((SECONDS - step_started))
    else
        printf 'failed after %d s; going on without: %s (log: %s)\n' $((SECONDS - step_started)) "$without" "$step_log"
    fi
}
