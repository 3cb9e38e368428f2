#!/usr/bin/env bash
# Make the reference models of this folder anew, from published text to drafters.
#
#   models/build.sh [STAGE ...]      stages, in this order: text targets answers drafters (all without an argument)
#                                    carryover teaches the drafters to read rejected rows; hybrid makes a drafter for
#                                    the hybrid target, ready teaches it to read recurrent states; lookup fits tables
#                                    for drafters of both
#
# Wants one GPU: on an H200 the targets took 6 minutes, the answers 40 seconds, the drafters 5 and carryover 8 minutes;
# hybrid took 6, and the eight runs of ready 35 minutes, up to four side by side (one after the other they need less
# memory).
# The hybrid target needs flash-linear-attention (Triton 3.8 or newer on Hopper) to train in that time.
# PYTHON names the interpreter (default .venv/bin/python); COMPILE= turns torch.compile off; the steps and sizes below
# can be given in the environment too (they are those of the models here). A stage that was killed goes on where it was
# when it is called again. The results lie in build/models.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
BUILD=${BUILD:-build}
COMPILE=${COMPILE---compile}
WORKERS=${WORKERS:-4}
TARGET_BATCH=${TARGET_BATCH:-256}
DENSE_STEPS=${DENSE_STEPS:-4675}
HYBRID_STEPS=${HYBRID_STEPS:-2749}
DFLASH_STEPS=${DFLASH_STEPS:-9007}
DSPARK_STEPS=${DSPARK_STEPS:-6953}
CARRYOVER_DFLASH_STEPS=${CARRYOVER_DFLASH_STEPS:-4149}
CARRYOVER_DSPARK_STEPS=${CARRYOVER_DSPARK_STEPS:-3200}
HYBRID_DSPARK_STEPS=${HYBRID_DSPARK_STEPS:-3137}
READY_FIRST_STEPS=${READY_FIRST_STEPS:-3949}
READY_SECOND_STEPS=${READY_SECOND_STEPS:-1049}
READY_THIRD_STEPS=${READY_THIRD_STEPS:-6000}
ANSWERS=${ANSWERS:-80000}
ANSWER_BATCH=${ANSWER_BATCH:-4096}
HYBRID_ANSWERS=${HYBRID_ANSWERS:-111585}
HYBRID_ANSWER_BATCH=${HYBRID_ANSWER_BATCH:-8192}

train() { "$PYTHON" -m sglang_ext.cli train "$@"; }
resumable() { # OUT STAGE [OPTION ...]: start, go on, or leave a finished run alone
  local out=$1 && shift
  if [ -f "$out/provenance.json" ]; then
    echo "$out is there already"
  elif [ -f "$out/settings.json" ]; then
    train "$@" --out "$out" --resume
  else
    train "$@" --out "$out"
  fi
}

text() {
  [ -f "$BUILD/data/manifest.json" ] || train data --out "$BUILD/data"
  [ -f "$BUILD/tokenizer/tokenizer.json" ] || train tokenizer --data "$BUILD/data" --out "$BUILD/tokenizer"
  [ -f "$BUILD/tokens/heldout/index.json" ] ||
    train encode --data "$BUILD/data" --tokenizer "$BUILD/tokenizer" --out "$BUILD/tokens"
}

target() { # PRESET NAME STEPS
  resumable "$BUILD/models/$2" target --preset "$1" --tokens "$BUILD/tokens" --tokenizer "$BUILD/tokenizer" \
    --manifest "$BUILD/data/manifest.json" --steps "$3" --batch-size "$TARGET_BATCH" --workers "$WORKERS" $COMPILE
}

targets() {
  target dense-small dense-target "$DENSE_STEPS" & local dense=$!
  target hybrid-small hybrid-target "$HYBRID_STEPS" & local hybrid=$!
  wait "$dense" && wait "$hybrid"
}

answers() {
  [ -f "$BUILD/answers/heldout/index.json" ] ||
    train regenerate --target "$BUILD/models/dense-target" --tokens "$BUILD/tokens" --out "$BUILD/answers" \
      --limit "$ANSWERS" --batch-size "$ANSWER_BATCH"
}

drafter() { # KIND STEPS
  resumable "$BUILD/models/$1-dense" drafter --kind "$1" --target "$BUILD/models/dense-target" \
    --data "$BUILD/answers" --steps "$2" --workers "$WORKERS" $COMPILE
}

drafters() {
  drafter dflash "$DFLASH_STEPS" & local dflash=$!
  drafter dspark "$DSPARK_STEPS" & local dspark=$!
  wait "$dflash" && wait "$dspark"
}

carry() { # KIND on|off STEPS LEARNING_RATE
  resumable "$BUILD/models/carryover-$2-$1-dense" carryover --drafter "$BUILD/models/$1-dense" --carry "$2" \
    --target "$BUILD/models/dense-target" --data "$BUILD/answers" --steps "$3" --lr "$4" --workers "$WORKERS" $COMPILE
}

carryover() { # the Carryover drafters, and as their controls the same steps without carried rows
  local mode jobs=()
  for mode in on off; do
    carry dflash "$mode" "$CARRYOVER_DFLASH_STEPS" 6e-4 & jobs+=($!)
    carry dspark "$mode" "$CARRYOVER_DSPARK_STEPS" 5e-4 & jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job"; done
}

hybrid() { # greedy answers of the hybrid target to all prompts of at most 128 tokens, and a DSpark drafter
  [ -f "$BUILD/answers-hybrid/heldout/index.json" ] ||
    train regenerate --target "$BUILD/models/hybrid-target" --tokens "$BUILD/tokens" --out "$BUILD/answers-hybrid" \
      --limit "$HYBRID_ANSWERS" --held-out-limit 1024 --max-prompt 128 --max-new-tokens 128 --greedy 1 \
      --batch-size "$HYBRID_ANSWER_BATCH"
  resumable "$BUILD/models/dspark-hybrid" drafter --kind dspark --target "$BUILD/models/hybrid-target" \
    --data "$BUILD/answers-hybrid" --steps "$HYBRID_DSPARK_STEPS" --lr 2e-3 --anchors 128 --workers "$WORKERS" $COMPILE
}

adapt() { # NAME FROM STEPS LEARNING_RATE [OPTION ...]: one stage of ReaDy, or of a control without a reader
  local name=$1 from=$2 steps=$3 rate=$4 && shift 4
  resumable "$BUILD/models/$name" ready --drafter "$BUILD/models/$from" --target "$BUILD/models/hybrid-target" \
    --data "$BUILD/answers-hybrid" --tune lora --lora-rank 32 --lora-alpha 64 --anchors 64 --steps "$steps" \
    --lr "$rate" --workers 1 "$@"
}

ready() { # reader and LoRA together, then further, each time with a fresh LoRA, or with carried rows; controls: LoRA alone
  local reader=(--rank 32 --source-layers 0 1 2 4 5 6 --layers 0 1) carry=(--carry on --embedding-start 3.3)
  adapt ready-dspark-hybrid-1 dspark-hybrid "$READY_FIRST_STEPS" 2e-3 --dtype float32 "${reader[@]}"
  adapt control-1 dspark-hybrid "$READY_FIRST_STEPS" 2e-3 --dtype float32 --reader off
  adapt ready-dspark-hybrid-2 ready-dspark-hybrid-1 "$READY_SECOND_STEPS" 1e-3
  adapt control-2 control-1 "$READY_SECOND_STEPS" 1e-3 --reader off
  adapt ready-dspark-hybrid ready-dspark-hybrid-2 "$READY_THIRD_STEPS" 2e-3
  adapt control-dspark-hybrid control-2 "$READY_THIRD_STEPS" 2e-3 --reader off
  adapt ready-carried-dspark-hybrid ready-dspark-hybrid-1 "$READY_SECOND_STEPS" 1e-3 "${carry[@]}"
  adapt carryover-dspark-hybrid control-1 "$READY_SECOND_STEPS" 1e-3 --reader off "${carry[@]}"
}

table() { # NAME FROM TARGET ANSWERS: a drafter with a lookup table, without the answers to the prompts that are evaluated
  [ -f "$BUILD/models/$1/lookup.json" ] ||
    train lookup --drafter "$BUILD/models/$2" --target "$BUILD/models/$3" --data "$BUILD/$4" \
      --leave-out models/prompts.jsonl --out "$BUILD/models/$1"
}

lookup() { # on a CPU too: 2, 2 and 10 minutes
  table carryover-dflash-dense carryover-on-dflash-dense dense-target answers
  table carryover-dspark-dense carryover-on-dspark-dense dense-target answers
  table ready-carryover-dspark-hybrid ready-dspark-hybrid hybrid-target answers-hybrid
}

for stage in "${@:-text targets answers drafters}"; do
  for name in $stage; do
    "$name"
  done
done
