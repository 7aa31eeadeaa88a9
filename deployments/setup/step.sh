# Functions, sourced by set-up scripts, that run a step with one line of output and a log file.
# LAKEVISION_STEP_LOG=- prints the output instead, for image builds: there a failed step's log is lost with its layer.

setup_logs=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}/logs

# run_step NAME COMMAND...: run a command or function; set $step_status to its exit status and $step_log to its log.
# Do not use it in a condition: there bash ignores `set -e`, also within functions.
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

# step NAME COMMAND...: run one step; on failure print the path and the last lines of its log, and exit.
step() {
    run_step "$@"
    if [ "$step_status" -ne 0 ]; then
        printf 'failed after %d s\n' $((SECONDS - step_started))
        printf 'setup: %s failed; the full log is %s' "$1" "$step_log" >&2
        if [ "$step_log" = above ]; then
            printf '\n' >&2
        else
            printf ', its last lines:\n' >&2
            tail -n 12 "$step_log" | sed 's/^/    /' >&2
        fi
        exit "$step_status"
    fi
    printf '%d s\n' $((SECONDS - step_started))
}

# optional_step NAME CONSEQUENCE COMMAND...: run a dispensable step; on failure print the consequence, and continue.
optional_step() {
    local name=$1 consequence=$2
    shift 2
    run_step "$name" "$@"
    if [ "$step_status" -eq 0 ]; then
        printf '%d s\n' $((SECONDS - step_started))
    else
        printf 'failed after %d s, not required: %s (log: %s)\n' $((SECONDS - step_started)) "$consequence" "$step_log"
    fi
}
