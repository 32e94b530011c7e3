#!/usr/bin/env bash
# Makes .venv with pinned versions, or brings it up to date; does nothing when it is.
#
#   scripts/setup.sh [EXTRA ...]     extras of pyproject.toml beside cpu/gpu, e.g. dev wandb
#   scripts/setup.sh light           makes .venv-light, the core without Ray and vLLM (scripts/test.sh light)
#   scripts/setup.sh oldest|newest   makes .venv-oldest or .venv-newest for CPUs, with the oldest or the newest versions that the
#                                    ranges of pyproject.toml allow (scripts/test.sh compat)
#
#   GRPO_RL_DEVICE=cpu|cuda   which build of vLLM and torch; default: cuda where nvidia-smi finds a GPU
#   PYTHON=python3.12         which Python; default: the first of 3.11, 3.12, 3.13 that is there
#   PIP_FIND_LINKS, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL   are handed on to uv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly UV_VERSION=0.13.8
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
case ${1:-} in
    light | oldest | newest) readonly VENV=.venv-$1 ;;
    *) readonly VENV=.venv ;;
esac
readonly VENV_PYTHON=$VENV/bin/python
readonly LOG=$VENV/setup.log

fail() {
    printf '\nsetup failed: %s\n' "$1" >&2
    exit 1
}

choose_device() {
    local device=${GRPO_RL_DEVICE:-}
    if [[ -z $device ]]; then
        if nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; else device=cpu; fi
    fi
    [[ $device == cpu || $device == cuda ]] || fail "GRPO_RL_DEVICE=$device: it must be cpu or cuda"
    printf '%s' "$device"
}

check_machine() {
    [[ $(uname -s) == Linux ]] || fail "this is $(uname -s); vLLM needs Linux. docker/Dockerfile.cpu runs anywhere."
    if [[ $1 == cpu && $(uname -m) == x86_64 ]] && ! grep -qw avx2 /proc/cpuinfo; then
        fail "this processor has no AVX2, which the CPU build of vLLM needs"
    fi
    if ldd --version 2>&1 | grep -qi musl; then
        fail "this system is built on musl (as Alpine is): torch and vLLM are published for glibc only. docker/Dockerfile.cpu runs anywhere."
    fi
    local python
    python=$(find_python)
    if [[ $1 == cpu && $VENV != .venv-light ]] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
        fail "the system library libnuma.so.1 is missing, which vLLM's CPU build needs:
    sudo apt-get install libnuma1        Debian, Ubuntu
    sudo dnf install numactl-libs        Fedora, RHEL
Without root, on Debian and Ubuntu, and in every shell that trains:
    apt-get download libnuma1 && dpkg -x libnuma1_*.deb ~/libnuma
    export LD_LIBRARY_PATH=\$(dirname ~/libnuma/usr/lib/*/libnuma.so.1)"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python from 3.11 to 3.13 found (looked for: ${PYTHON:-python3.11 python3.12 python3.13 python3}).
Install one, e.g. 'sudo apt-get install python3.11 python3.11-venv', or name yours: PYTHON=/path/to/python"
}

# step TITLE COMMAND...: runs it with its output in the log, shows the seconds and the last line of output.
step() {
    local title=$1 start=$SECONDS job
    shift
    "$@" >>"$LOG" 2>&1 &
    job=$!
    if [[ -t 1 ]]; then
        while kill -0 "$job" 2>/dev/null; do
            printf '\r\033[K%s: %d s  %s' "$title" $((SECONDS - start)) "$(tail -n 1 "$LOG" | tr -cd '[:print:]' | cut -c 1-60)"
            sleep 0.3
        done
        printf '\r\033[K'
    else
        echo "$title ..."
    fi
    if ! wait "$job"; then
        tail -n 25 "$LOG" >&2
        fail "$title. The whole output is in $LOG"
    fi
    echo "$title: $((SECONDS - start)) s"
}

make_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        fail "$python cannot make virtual environments; install its venv package,
e.g. 'sudo apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')'"
    fi
    step "making $VENV with $("$python" --version)" "$python" -m venv "$VENV"
}

# uv does not read pip's settings, which is where a mirror or a folder with wheels is usually named.
hand_pip_settings_to_uv() {
    local links=${PIP_FIND_LINKS:-$($VENV_PYTHON -m pip config get global.find-links 2>/dev/null || true)}
    local index=${PIP_INDEX_URL:-$($VENV_PYTHON -m pip config get global.index-url 2>/dev/null || true)}
    if [[ -n $links ]]; then export UV_FIND_LINKS=${UV_FIND_LINKS:-${links// /,}}; fi
    if [[ -n $index ]]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
    if [[ -n ${PIP_EXTRA_INDEX_URL:-} ]]; then export UV_INDEX=${UV_INDEX:-$PIP_EXTRA_INDEX_URL}; fi
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

install_cpu_torch() {
    local version from=()
    version=$(sed -n 's/^torch==//p' scripts/constraints.txt)
    if [[ -z ${UV_FIND_LINKS:-} ]]; then from=(--index "$TORCH_CPU_INDEX"); fi
    # Alone, so that nothing else is taken from that index; its dependencies come with the next step.
    step "installing torch $version for CPU" \
        "$VENV/bin/uv" pip install --python "$VENV_PYTHON" --no-deps "${from[@]}" "torch==$version+cpu"
}

# install_all DEVICE EXTRA...
install_all() {
    local device=$1 versions=(--constraint scripts/constraints.txt) extras
    shift
    case $VENV in
        .venv) extras=("${device/cuda/gpu}" "$@") ;;
        .venv-light) extras=(dev) ;;
        .venv-oldest) extras=(cpu dev) versions=(--resolution lowest-direct) ;;
        .venv-newest) extras=(cpu dev) versions=(--upgrade) ;;
    esac
    if [[ $device == cpu ]]; then
        versions+=(--override scripts/cpu-overrides.txt)
        install_cpu_torch
        "$VENV/bin/uv" pip uninstall --python "$VENV_PYTHON" torchvision torchaudio torchcodec &>/dev/null
    fi
    extras=$(IFS=,; echo "${extras[*]}")
    step "installing grpo_rl[$extras]" "$VENV/bin/uv" pip install --python "$VENV_PYTHON" "${versions[@]}" -e ".[$extras]"
    step "compiling to bytecode" compile_bytecode
}

# uv leaves this to the first import, which a run makes in ten processes at once, and which keeps nothing where
# PYTHONDONTWRITEBYTECODE is set: importing vLLM took 22 s then instead of 9. Some packages ship files that are
# no Python of this version: not an error.
compile_bytecode() {
    local packages
    packages=$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$VENV_PYTHON" -m compileall -q -j 0 -x '/(tests?|testing/_internal|anthropic|pip|setuptools)/' "$packages" || true
}

main() {
    local device extra stamp missing=()
    if [[ $VENV == .venv ]]; then device=$(choose_device); else device=cpu; fi
    mkdir -p "$VENV"
    # Two scripts started at once must not install into one environment at once. (.venv/.lock is uv's own.)
    exec 9>"$VENV/.setup-lock"
    flock 9

    stamp=$(
        {
            echo "$device $PWD"
            cat pyproject.toml scripts/setup.sh scripts/cpu-overrides.txt scripts/constraints.txt
        } | sha256sum | cut -c 1-16
    )
    for extra in base "$@"; do
        if [[ $(cat "$VENV/.stamp-$extra" 2>/dev/null) != "$stamp" ]]; then missing+=("$extra"); fi
    done
    if [[ ${#missing[@]} == 0 && -x $VENV_PYTHON ]]; then return; fi

    check_machine "$device"
    echo "Preparing $VENV for $device. The first time this takes some minutes and several GB of disk (CPU: 4, light: 2)."
    # Removed first: a setup that is broken off must not look finished the next time.
    rm -f "$VENV"/.stamp-*
    : >"$LOG"
    "$VENV_PYTHON" -c '' 2>/dev/null || make_venv
    hand_pip_settings_to_uv
    step "installing uv $UV_VERSION" "$VENV_PYTHON" -m pip install --disable-pip-version-check "uv==$UV_VERSION"
    install_all "$device" "$@"
    for extra in base "$@"; do echo "$stamp" >"$VENV/.stamp-$extra"; done
    echo "Ready: $VENV ($device)"
}

main "$@"
