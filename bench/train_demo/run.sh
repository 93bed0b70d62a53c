#!/usr/bin/env bash
# Train both demo models side by side: run.sh SECONDS TOTAL snapshot|export STATE_FOLDER OUT_FOLDER
# One accelerator each if there are two, else they share. Falls back to uncompiled blocks.
set -u
seconds=$1 total=$2 deliver=$3 state=$4 out=$5
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$state/inductor OMP_NUM_THREADS=4
gpus=$(nvidia-smi -L | wc -l)
workers=$(( $(nproc) / 2 - 1 ))
mkdir -p "$out" "$state"
begin=$SECONDS

one() { # FAMILY GPU
  local log=$out/$1.log
  local run=(python3 -m bench.train_demo.train "$1" --size narrow --total "$total" --state "$state/$1"
    --out "$out" --deliver "$deliver" --workers "$workers")
  CUDA_VISIBLE_DEVICES=$2 "${run[@]}" --seconds "$seconds" >"$log" 2>&1 && return
  local left=$(( seconds - (SECONDS - begin) ))
  [ "$left" -gt 60 ] || return 1
  echo "== again, not compiled, ${left} s" >>"$log"
  CUDA_VISIBLE_DEVICES=$2 "${run[@]}" --seconds "$left" --rows 32 --no-compile >>"$log" 2>&1
}

one deepseek-v4 0 &
one glm $(( gpus > 1 ? 1 : 0 )) &
wait
for family in deepseek-v4 glm; do
  echo "== $family"
  grep -v '^[ {}"]*$' "$out/$family.log" | head -c 1500
  echo "..."
  tail -c 4000 "$out/$family.log"
done
ls -l "$out"
