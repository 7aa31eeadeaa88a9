# Functions, sourced by set-up scripts, that run a step with one line of output and a log file.
# LAKEVISION_STEP_LOG=- prints the output instead, for image builds: there a failed step's log is lost with its layer.

setup_logs=${LAKEVISION_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lakevision}/logs

# new_log NAME: set $step_log to the path of a step's log.
new_log() {
    mkdir -p "$setup_logs"
    find "$setup_logs" -name '*.log' -mtime +30 -delete
    step_log=$setup_logs/$(date +%Y%m%d-%H%M%S)-$$-$(tr -cs '[:alnum:]\n' - <<<"${1%% (*}" | tr '[:upper:]' '[:lower:]').log
}

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
        new_log "$name"
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

# end_step NAME SECONDS: end a step's line; on failure print the path and the last lines of its log, and exit.
end_step() {
    if [ "$step_status" -ne 0 ]; then
        printf 'failed after %d s\n' "$2"
        printf 'setup: %s failed; the full log is %s' "$1" "$step_log" >&2
        if [ "$step_log" = above ]; then
            printf '\n' >&2
        else
            printf ', its last lines:\n' >&2
            tail -n 12 "$step_log" | sed 's/^/    /' >&2
        fi
        exit "$step_status"
    fi
    printf '%d s\n' "$2"
}

# step NAME COMMAND...: run one step; if it fails, exit.
step() {
    run_step "$@"
    end_step "$1" $((SECONDS - step_started))
}

# start_step NAME COMMAND...: run one step beside those that follow, until await_step.
# Call stop_started_step in a trap on EXIT: an interrupt does not reach the step, which has a process group of its own.
start_step() {
    started_name=$1 started_at=$EPOCHSECONDS
    shift
    if [ "${LAKEVISION_STEP_LOG:-}" = - ]; then started_log=$(mktemp); else new_log "$started_name" && started_log=$step_log; fi
    set -m
    (
        set -e
        "$@"
    ) >"$started_log" 2>&1 </dev/null &
    set +m
    started_pid=$!
}

# await_step: wait for the started step, and print its line; if it failed, exit. The line has the step's own seconds.
await_step() {
    if [ "${LAKEVISION_STEP_LOG:-}" != - ]; then printf '\033[1m==>\033[0m %s ... ' "$started_name"; fi
    step_status=0
    wait "$started_pid" || step_status=$?
    started_pid=
    local seconds=$(($(stat -c %Y "$started_log") - started_at)) # the log's last lines were written at the end
    step_log=$started_log
    if [ "${LAKEVISION_STEP_LOG:-}" = - ]; then
        step_log="above"
        printf '\033[1m==>\033[0m %s\n' "$started_name"
        cat "$started_log"
        rm "$started_log"
        printf '\033[1m==>\033[0m %s ... ' "$started_name"
    fi
    end_step "$started_name" "$seconds"
}

# stop_started_step: end the started step with all its processes, if it runs.
stop_started_step() {
    if [ -n "${started_pid:-}" ] && kill -- "-$started_pid" 2>/dev/null; then
        wait "$started_pid" || true
    fi
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
