#!/usr/bin/env bash
# All GPU measurements within eleven minutes on a machine that has PyTorch and no package registry.
#
#   bash benchmarks/gpu_lease.sh wheels            where there is a registry: the packages it lacks, into .whl
#   bash benchmarks/gpu_lease.sh OUT [CHECK ...]   there: OUT/lease.json; SMALL=1 rehearses on a CPU
#
# Checks, in this order by default: tests, of benchmarks/gpu_training.py, of benchmarks/gpu_serving.py.
set -uo pipefail
cd "$(dirname "$0")/.."
WHEELS="annotated-types cffi datasets dill espeakng-loader importlib-resources docstring-parser jiwer lightning-fabric
lightning-utilities more-itertools multiprocess pycodec2 pycparser pydantic pydantic-core rapidfuzz snac soundfile
torchdata torchjd typeshed-client typing-inspection"
VERSION=${VERSION:-3.12}  # of Python there
TRAINING="batches products heads attention rows"
SERVING="steps codec questions live"
declare -A SECONDS_OF=([tests]=160 [batches]=130 [products]=20 [heads]=25 [attention]=40 [rows]=80 [steps]=50 [codec]=40
    [questions]=30 [live]=230)

pinned() { # the version that the environment here was tested with
    .venv/bin/python -c "import sys; from importlib.metadata import version as v; print(*(f'{n}=={v(n)}' for n in sys.argv[1:]))" "$@"
}

if [ "${1:-}" = wheels ]; then
    mkdir -p .whl
    platforms=$(printf -- '--platform manylinux_2_%s_x86_64 ' 28 27 17)
    # shellcheck disable=SC2046,SC2086
    .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$VERSION" --implementation cp \
        $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest .whl $(pinned $WHEELS) \
        && .venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir .whl "$(pinned openai-whisper)"
    exit
fi

out=${1:?usage: bash benchmarks/gpu_lease.sh OUT [CHECK ...]}
shift
python=python3
if compgen -G '.whl/*.whl' > /dev/null && [ -z "${SMALL:-}" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$HOME/site" .whl/*.whl || exit
    export PYTHONPATH="$HOME/site:$PWD"
elif [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
export PYTHONUNBUFFERED=1
mkdir -p "$out"
command -v nvidia-smi > /dev/null && nvidia-smi
red=0
for check in ${*:-tests $TRAINING $SERVING}; do
    limit=${SECONDS_OF[$check]:?no check is called $check}
    case " $TRAINING " in *" $check "*) module=benchmarks.gpu_training ;; *) module=benchmarks.gpu_serving ;; esac
    if [ "$check" = tests ]; then
        timeout "$limit" "$python" -m pytest -m cuda -rs -q -p no:cacheprovider --durations 8 2>&1 | tee "$out/tests.log" | tail -40
    else
        timeout "$limit" "$python" -m "$module" "$check" --out "$out/lease.json" ${SMALL:+--small}
    fi || { red=1; echo "$check: failed, or took over $limit s"; }
done
exit "$red"
