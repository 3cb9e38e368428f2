#!/usr/bin/env bash
# Make the reference models of this folder anew, from published text to drafters.
#
#   models/build.sh [STAGE ...]      stages, in this order: text targets answers drafters (all without an argument)
#
# Wants one GPU and about half an hour. The hybrid target needs flash-linear-attention to train in that time.
# PYTHON names the interpreter (default .venv/bin/python); COMPILE= turns torch.compile off; the steps and sizes below
# can be given in the environment too. A stage that was killed goes on where it was when it is called again.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
BUILD=${BUILD:-build}
COMPILE=${COMPILE---compile}
TARGET_STEPS=${TARGET_STEPS:-3000}
TARGET_BATCH=${TARGET_BATCH:-256}
DRAFTER_STEPS=${DRAFTER_STEPS:-4000}
ANSWERS=${ANSWERS:-120000}

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

target() { # PRESET NAME
  resumable "$BUILD/models/$2" target --preset "$1" --tokens "$BUILD/tokens" --tokenizer "$BUILD/tokenizer" \
    --manifest "$BUILD/data/manifest.json" --steps "$TARGET_STEPS" --batch-size "$TARGET_BATCH" $COMPILE
}

targets() {
  target dense-small dense-target & local dense=$!
  target hybrid-small hybrid-target & local hybrid=$!
  wait "$dense" && wait "$hybrid"
}

answers() {
  [ -f "$BUILD/answers/heldout/index.json" ] ||
    train regenerate --target "$BUILD/models/dense-target" --tokens "$BUILD/tokens" --out "$BUILD/answers" \
      --limit "$ANSWERS" --batch-size 2048
}

drafter() { # KIND
  resumable "$BUILD/models/$1-dense" drafter --kind "$1" --target "$BUILD/models/dense-target" \
    --data "$BUILD/answers" --steps "$DRAFTER_STEPS" $COMPILE
}

drafters() {
  drafter dflash & local dflash=$!
  drafter dspark & local dspark=$!
  wait "$dflash" && wait "$dspark"
}

for stage in "${@:-text targets answers drafters}"; do
  for name in $stage; do
    "$name"
  done
done
