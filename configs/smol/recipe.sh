#!/usr/bin/env bash
# From a language model and a Whisper to a model that hears whoever speaks, as docs/real.md tells it, in an empty folder, or one with
# one's own sentences.csv and questions.csv (a column question_text). Data that are there are kept; a GPU is used where there is one.
#
#   bash recipe.sh parts/smollm parts/whisper               hours of two cores
#   MINUTES=4 bash recipe.sh parts/smollm parts/whisper     ten minutes of a GPU, once the sounds are made
set -euo pipefail
lm=${1:?usage: bash recipe.sh LANGUAGE_MODEL WHISPER}   # such as Qwen2.5-0.5B-Instruct
whisper=${2:?usage: bash recipe.sh LANGUAGE_MODEL WHISPER} # such as whisper-small
minutes=${MINUTES:-60} sentences=${SENTENCES:-60000} held_out=${HELD_OUT:-200}
device=$(python -c "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')")
configs=$(cd "$(dirname "$0")" && pwd)
voices='{espeak:en-us+f1: 1, espeak:en-us+f2: 1, espeak:en-us+f3: 1, espeak:en-gb+f4: 1, espeak:en-us+m1: 1, espeak:en-us+m2: 1,
  espeak:en-gb+m3: 1, espeak:en-gb-scotland+m4: 1, espeak:en-us+m5: 1, espeak:en-us+m6: 1, flite:slt: 1, flite:awb: 1, flite:kal16: 1}'
others='{espeak:en-us+f5: 2, espeak:en-gb+m7: 2, espeak:en-us+m8: 2, flite:rms: 3}'
augment='{speed: [0.88, 1.14], noise_snr_db: [5, 30], noise_probability: 0.2, echo_probability: 0.2, band_probability: 0.15}'

if [ ! -e models/smol-base ]; then
    omni-train convert "$lm" models/smol-base --encoder "$whisper" --encoder_window 6 --codec codec2-1600 --talker 4 \
        --projector transformer --projector_hidden 768 --projector_stack 4
fi
speak() { # TEXTS OUT VOICES [OPTIONS]: the texts as sounds, with what the encoder hears of them
    [ -e "$2" ] || omni-train data prepare "$1" "$2" --speak question --voice "$3" --frames models/smol-base --device "$device" \
        --speaking.rate '[115,215]' --speaking.pitch '[20,80]' --speaking.silence '[0.05,0.5]' "${@:4}"
}
say() { # TEXTS OUT: the texts as answers, in one voice
    [ ! -e "$2" ] || return 0
    awk '{ sub(/\r$/, "") } NR == 1 { print "question_text,answer_text"; next } { print $0 "," $0 }' "$1" > "said-$1"
    omni-train data prepare "said-$1" "$2" --speak answer --voice flite:slt --codec codec2-1600
}
[ -e sentences.csv ] || python "$configs/texts.py"
for name in sentences questions; do
    awk "NR <= 1 + $held_out" $name.csv > $name-held-out.csv
    awk "NR == 1 || NR > 1 + $held_out && NR <= 1 + $held_out + $sentences" $name.csv > $name-train.csv
done

speak sentences-train.csv data/hearing "$voices" --augment "$augment"
speak sentences-held-out.csv data/hearing-held-out "$others"
speak questions-train.csv data/questions "$voices" --augment "$augment"
speak questions-held-out.csv data/questions-held-out "$others"
processes=$([ $device = cpu ] && echo 2 || echo 1)
omni-train fit "$configs/hearing.yaml" --budget.minutes "$minutes" --fabric.devices $processes

for name in '' -held-out; do
    [ -e "data/answered$name" ] || omni-train data answers models/smol-base "data/questions$name" "data/answered$name" \
        --device "$device" --dtype bfloat16 --rows 64
done
omni-train fit "$configs/answering.yaml" --budget.minutes $(((minutes + 3) / 4))
say sentences-train.csv data/speaking
say sentences-held-out.csv data/speaking-held-out
omni-train fit "$configs/speaking.yaml" --budget.minutes "$minutes" --fabric.devices $processes

omni-train eval runs/smol-answering/model data/hearing-held-out --out reports/hearing --task A1T1
omni-train eval runs/smol-answering/model data/answered-held-out --out reports/answering --task A1T2 --text true
omni-train eval runs/smol-speaking/model data/speaking-held-out --out reports/speaking --task T1A2 --asr "$whisper"
