#!/usr/bin/env bash
# A first run on a CUDA device, stage by stage; each leaves its result in OUT before the next begins.
#   bash benchmarks/first_device_run.sh [OUT]
# Needs this folder and a Python with torch for CUDA; wheels of what is missing are taken from $WHEELS, a folder, if it is set.
# $MINUTES (default 9) is what all stages may take together.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-first-device-run}
python=${PYTHON:-python3}
end=$(awk "BEGIN { print int($SECONDS + ${MINUTES:-9} * 60) }")
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

left() { echo $((end - SECONDS)); }
# stage NAME SECONDS COMMAND...: at most so long, and never beyond the end of all.
stage() {
    local name=$1 limit=$2
    shift 2
    [ "$(left)" -gt 5 ] || { echo "== $name: no time left" | tee -a "$out/stages.txt"; return 0; }
    [ "$limit" -lt "$(left)" ] || limit=$(left)
    echo "== $name (at most $limit s): $*" | tee -a "$out/stages.txt"
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    echo "== $name: exit status $?, $(left) s left" | tee -a "$out/stages.txt"
    tail -n 15 "$out/$name.txt"
}

if ! "$python" -c 'import spikingjelly, pydantic, loguru' 2>/dev/null; then
    stage install 120 "$python" -m pip install --no-index --find-links "${WHEELS:?a folder with the wheels that are missing}" \
        --no-deps $(find "$WHEELS" -type f -name '*.whl')
fi
stage kernels 120 "$python" sj_tac/kernels/cpu/compiling.py
stage machine 60 "$python" -m sj_tac env
stage calls 120 "$python" -m benchmarks.first_device --out "$out/calls.jsonl"
stage calls-nvrtc 60 "$python" -m benchmarks.first_device --backend nvrtc --out "$out/calls-nvrtc.jsonl"
stage tests 240 "$python" -m pytest -q -p no:cacheprovider -m gpu -n 8 tests/test_gpu.py tests/test_gpu_nets.py tests/kernels/test_gpu_fire.py
stage figures 400 "$python" -m benchmarks.gpu --out "$out/gpu" --no-compile --minutes "$(($(left) / 60))"
echo "Written: $out"
