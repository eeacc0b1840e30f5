#!/usr/bin/env bash
# What a user feels of this checkout, over a commit: both in turns on this machine, medians of five.
#
#   bash benchmarks/against.sh COMMIT [ROUNDS [CHECK ...]]      from a checkout with its environment in .venv
#
# Checks: ask (from nothing, wall time), first (nano), sessions (64 nonstop), int8 (0.5B, first sound), training (nano).
set -euo pipefail
cd "$(dirname "$0")/.."
commit=${1:?usage: bash benchmarks/against.sh COMMIT [ROUNDS [CHECK ...]]}
rounds=${2:-5}
checks=${*:3}
here=$PWD
python=$here/.venv/bin/python
place=$(mktemp -d)
parent=$place/parent
trap 'git worktree remove --force "$parent" 2> /dev/null; rm -rf "$place"' EXIT
git worktree add --quiet --detach "$parent" "$commit"
question=$parent/question.wav
"$python" - "$question" << 'END'
import sys

import numpy as np
import soundfile

soundfile.write(sys.argv[1], np.random.default_rng(0).normal(0, 0.1, 32000).astype(np.float32), 16000)
END

run() { # TREE COMMAND ...: in a folder of its own, with the tree's code
    (cd "$place" && PYTHONPATH=$1 "$python" -m "${@:2}")
}

number() { # reads a bench's JSON; PATTERN of the row, or a path of keys
    "$python" -c "
import json, sys
table = json.load(sys.stdin)['tables'][0]
print(next(row['value'] for row in table['rows'] if row['name'] == sys.argv[1]) if 'rows' in table else table['runs'][0]['step']['p50'])
" "$1"
}

wall() { # COMMAND ...: its seconds
    local start
    start=$(date +%s.%N)
    "$@" > /dev/null 2>&1
    "$python" -c "import sys; print(float(sys.argv[2]) - float(sys.argv[1]))" "$start" "$(date +%s.%N)"
}

measure() { # CHECK TREE: one figure
    local bench=(infer bench --json --device cpu)
    case $1 in
        ask) wall run "$2" infer ask "$question" --model nano --device cpu --out answer.wav ;;
        first) run "$2" "${bench[@]}" --preset nano --repeat 3 2> /dev/null | number "first exact sample" ;;
        int8) run "$2" "${bench[@]}" --preset qwen2-0.5b-omni --quantize int8 --repeat 3 2> /dev/null | number "first exact sample" ;;
        sessions) run "$2" "${bench[@]}" --sessions 64 --nonstop --barge_in 0 --play_seconds "${SECONDS_EACH:-20}" 2> /dev/null | number step ;;
        training)
            local steps=("--budget.minutes=null" "--validation.questions=0" "--log.progress=off" "--fabric.accelerator=cpu")
            steps+=("--objective.align_first=0" "--run_folder=$place/run" "--resume=restart" "--seed=0")
            local few many recipe=nano-scratch
            [ -f "$2/configs/$recipe.yaml" ] || recipe=nano # its name before
            few=$(wall run "$2" train fit $recipe "${steps[@]}" --budget.steps=2)
            many=$(wall run "$2" train fit $recipe "${steps[@]}" --budget.steps="${STEPS:-42}")
            "$python" -c "import sys; print((float(sys.argv[2]) - float(sys.argv[1])) / (int(sys.argv[3]) - 2))" "$few" "$many" "${STEPS:-42}"
            ;;
    esac
}

for check in ${checks:-ask first sessions int8 training}; do
    : > "$place/parent.txt"
    : > "$place/ours.txt"
    for round in $(seq "$rounds"); do
        for tree in $([ $((round % 2)) = 1 ] && echo parent ours || echo ours parent); do
            measure "$check" "$([ $tree = ours ] && echo "$here" || echo "$parent")" >> "$place/$tree.txt"
        done
    done
    "$python" - "$check" "$place" << 'END'
import statistics
import sys
from pathlib import Path

theirs, ours = (statistics.median(map(float, Path(sys.argv[2], f"{name}.txt").read_text().split())) for name in ("parent", "ours"))
print(f"{sys.argv[1]}: parent {theirs:.4g} s, ours {ours:.4g} s, ours / parent {ours / theirs:.3f}", flush=True)
END
done
