#!/usr/bin/env bash
# Checks the kernels for GPUs against float64, times them on this machine's card, and writes
# benchmarks/results/<card>.md.
#
#     bash benchmarks/gpu.sh [check] [measure]     (both, if neither is named)
#
# Needs Python 3.12 with JAX 0.11 and its CUDA plugin, flax, optax and numpy; nothing needs to be
# installed of this project. Where jaxtyping is missing and cannot be installed a stand-in serves.
# torch and fbgemm-gpu, if they are there, are timed too. Each part runs in a process of its own, since a kernel that
# reads out of bounds takes its process with it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-python3}
parts=${*:-check measure}

if ! "$python" -c 'import jax; assert jax.default_backend() == "gpu"' 2>/dev/null; then
    echo "JAX sees no GPU here: $("$python" -c 'import jax; print(jax.devices())' 2>&1 | tail -n 1)"
    exit 1
fi
if ! "$python" -c 'import jaxtyping' 2>/dev/null &&
    ! "$python" -m pip install --quiet jaxtyping 2>/dev/null; then
    export PYTHONPATH=$PWD/benchmarks/gpu/stand_in${PYTHONPATH:+:$PYTHONPATH}
fi
# JAX warns that Triton is deprecated; the kernels are timed all the same.
export PYTHONWARNINGS="ignore::DeprecationWarning"

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
status=0
for implementation in reference triton; do
    for part in $parts; do
        echo "== $part $implementation"
        "$python" -m "benchmarks.gpu.$part" "$implementation" | tee -a "$lines" || status=1
    done
done
if [[ $parts == *measure* ]]; then
    if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        echo "== measure torch"
        "$python" -m benchmarks.gpu.measure torch | tee -a "$lines"
    fi
    if "$python" -c 'import fbgemm_gpu' 2>/dev/null; then
        echo "== measure fbgemm"
        "$python" -m benchmarks.gpu.peer_tbe | tee -a "$lines"
    fi
    "$python" -m benchmarks.gpu.report "$lines" || status=1
fi
exit "$status"
