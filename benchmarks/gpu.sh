#!/usr/bin/env bash
# Checks and times jaxrec on this machine's GPU, beside FBGEMM and TorchRec where they are installed,
# and writes benchmarks/results/<card>.md.
#
#     bash benchmarks/gpu.sh [--dry-run] [PART ...]
#
#     check     every implementation of the kernels against float64
#     kernels   times of lookups and updates
#     peers     times of FBGEMM and of torch.nn.EmbeddingBag on the same shapes
#     steps     times of whole training steps: DLRM, DLRM-DCNv2, SASRec; jaxrec, then TorchRec
#     attention HSTU attention on Hopper cards: checks against float64, then times beside XLA's
#     tier      tables beyond the card's memory and open vocabularies: checks against tables on the
#               card, then times
#
# All parts run if none is named; each ends within four minutes, attention within six, tier within
# seven. Every line of results is appended to $RESULTS as soon as it is there, so that a run which is
# cut keeps what it has, and parts may run one at a time: the page is made from all lines of the file.
# What did not begin in time is named.
# A dry run proves the script on a CPU: few small shapes, kernels interpreted, nothing of it a time.
#
#     RESULTS       file of JSON lines; default benchmarks/results/<card>.jsonl
#     KERNELS       implementations that `check` and `kernels` run; default: all that are here,
#                   except that `kernels` leaves out the reference
#     PYTHON        Python 3.12 with JAX 0.11 or later, flax, optax and numpy; default python3
#     PEER_PYTHON   Python with torch, fbgemm-gpu and torchrec; default $PYTHON
#     WHEELS        folder of wheels for the peers, installed into a temporary folder
#
# Nothing of this project needs to be installed. FBGEMM and TorchRec 1.N belong to torch 2.(N + 5).
# These are their wheels for torch 2.11, half a gigabyte, to carry to a machine without a network:
#
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#         --platform manylinux_2_28_x86_64 --dest wheels fbgemm-gpu==1.6.0
#     pip download --no-deps --only-binary=:all: --dest wheels torchrec==1.6.1 tensordict pyvers \
#         iopath portalocker pyre-extensions typing-inspect torchmetrics==1.0.3 lightning-utilities
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

dry=()
if [[ ${1:-} == --dry-run ]]; then
    dry=(--dry-run)
    shift
fi
python=${PYTHON:-python3}
peer=${PEER_PYTHON:-$python}
parts=(check kernels peers steps attention tier)
(($#)) && parts=("$@")
for part in "${parts[@]}"; do
    case $part in
    check | kernels | peers | steps | attention | tier) ;;
    *)
        echo "there is no part '$part'; there are check, kernels, peers, steps, attention and tier" >&2
        exit 2
        ;;
    esac
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if ((${#dry[@]})); then
    export JAX_PLATFORMS=cpu
    # To compile takes most of its time: LLVM optimizes nothing, and what parts share is compiled once.
    export XLA_FLAGS="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}"
    export JAX_COMPILATION_CACHE_DIR=$scratch/programs
    export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
    results=${RESULTS:-$scratch/cpu.jsonl}
elif card=$("$python" -c '
import jax, re
assert jax.default_backend() == "gpu", f"JAX sees no GPU here: {jax.devices()}"
print(re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-"))'); then
    results=${RESULTS:-benchmarks/results/$card.jsonl}
else
    exit 1
fi
# Trials of kernels and choices of `jaxrec tune` that an earlier run kept do not count here.
export JAXREC_CACHE_DIR=$scratch/cache
# JAX warns that Triton is deprecated; the kernels run all the same.
export PYTHONWARNINGS="ignore::DeprecationWarning"
# Stand-ins serve where these cannot be installed.
if ! "$python" -c 'import jaxtyping, tyro' 2>/dev/null &&
    ! timeout 60 "$python" -m pip install --quiet jaxtyping tyro 2>/dev/null; then
    export PYTHONPATH=$PWD/benchmarks/gpu/stand_in${PYTHONPATH:+:$PYTHONPATH}
fi
peer_path=${PYTHONPATH:-}
if [[ -n ${WHEELS:-} ]]; then
    "$peer" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/peers" \
        "$WHEELS"/*.whl || exit
    peer_path=$scratch/peers${PYTHONPATH:+:$PYTHONPATH}
fi
here=$("$python" -c '
from benchmarks.gpu.backends import BACKENDS, reason_missing
print(*(name for name in BACKENDS if reason_missing(name) is None))') || exit
read -ra checked <<<"${KERNELS:-$here reference}"
read -ra timed <<<"${KERNELS:-$here}"

mkdir -p "$(dirname "$results")"
status=0

# limited SECONDS COMMAND...: runs the command, appends its lines to the results as they come, and
# ends it where it takes longer. The command itself begins nothing new 20 seconds before. A dry run
# has time: interpreted kernels may be slow.
limited() {
    local seconds=$1
    shift
    ((${#dry[@]})) && seconds=3600
    timeout --kill-after 5 "$seconds" "$@" --seconds "$((seconds - 20))" "${dry[@]}" |
        tee -a "$results"
    local code=${PIPESTATUS[0]}
    ((code == 0)) || echo "-- $* ended with status $code" >&2
    return "$code"
}

has() { PYTHONPATH=$peer_path "$peer" -c "import $1" 2>/dev/null; }

# A kernel that reads out of bounds takes its process with it, so that each implementation has
# processes of its own; a card's checks are compiled by several at once.
check() {
    local processes=4 jobs=() name i
    ((${#dry[@]})) && processes=1
    for name in "${checked[@]}"; do
        for ((i = 1; i <= processes; i++)); do
            XLA_PYTHON_CLIENT_PREALLOCATE=false limited 230 "$python" -m benchmarks.gpu.check \
                "$name" --part "$i" "$processes" &
            jobs+=($!)
        done
    done
    for i in "${jobs[@]}"; do
        wait "$i" || status=1
    done
}

kernels() {
    local seconds=$((230 / ${#timed[@]})) name
    for name in "${timed[@]}"; do
        limited "$((seconds * 7 / 10))" "$python" -m benchmarks.gpu.measure "$name" || status=1
        limited "$((seconds * 3 / 10))" "$python" -m benchmarks.gpu.rows "$name" || status=1
    done
}

peers() {
    if has fbgemm_gpu; then
        PYTHONPATH=$peer_path limited 170 "$peer" -m benchmarks.gpu.peer_tbe || status=1
    else
        echo "-- FBGEMM is not here: the head of benchmarks/gpu.sh says how to bring it"
    fi
    if "$python" -c 'import torch' 2>/dev/null; then
        limited 60 "$python" -m benchmarks.gpu.measure torch || status=1
    fi
}

steps() {
    limited 110 "$python" -m benchmarks.gpu.dlrm || status=1
    if has torchrec; then
        PYTHONPATH=$peer_path limited 50 "$peer" -m benchmarks.gpu.peer_dlrm || status=1
        PYTHONPATH=$peer_path limited 70 "$peer" -m benchmarks.gpu.peer_dlrm --compiled || status=1
    else
        echo "-- TorchRec is not here: the head of benchmarks/gpu.sh says how to bring it"
    fi
}

attention() {
    limited 350 "$python" -m benchmarks.gpu.attention || status=1
}

tier() {
    if ! "$python" -c 'import msgspec, pyarrow' 2>/dev/null &&
        ! timeout 60 "$python" -m pip install --quiet msgspec pyarrow 2>/dev/null; then
        echo "-- tables beyond the card's memory need msgspec and pyarrow, which are not here"
        return
    fi
    limited 410 "$python" -m benchmarks.gpu.tier || status=1
}

for part in "${parts[@]}"; do
    echo "== $part"
    "$part"
done
if ((${#dry[@]} == 0)); then
    "$python" -m benchmarks.gpu.report "$results" || status=1
fi
exit "$status"
