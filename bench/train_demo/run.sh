#!/usr/bin/env bash
# Train demo models further on the first GPU, side by side, from the repository's root:
#   run.sh OUT SECONDS
# Leaves OUT/FAMILY.tar.xz.part* (the checkpoint, about SECONDS - TAIL after the start), OUT/FAMILY.json (scores of the
# training graph) and logs. Neither family ends the other. One whose first step, which compiles, is not done in time
# begins again without compiling.
#   FAMILIES  "deepseek-v4 glm"           TAIL      45, the seconds kept for export and scores
#   FLAGS     more for train.py           STATE     a folder for going on
#   COMPILE   210, seconds for it         LR        3e-3, the highest rate
set -u
out=$1 end=$(( $(date +%s) + $2 )) tail=${TAIL:-45} compile=${COMPILE:-210}
families=${FAMILIES:-deepseek-v4 glm} state=${STATE:-/tmp/train_demo} python=${PYTHON:-python3}
mkdir -p "$out" "$state"
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=2
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-6}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
left() { echo $(( end - $(date +%s) )); }

begin() { # FAMILY LONG_EVERY WORKERS FLAG..
  local family=$1 long=$2 workers=$3
  shift 3
  echo "== $family $*: $(left) s" >>"$out/$family.log"
  TORCHINDUCTOR_CACHE_DIR=$state/inductor-$family exec timeout -k 2 "$(left)" "$python" -m bench.train_demo.train \
    "$family" --size narrow --checkpoint "moet/demo/$family" --total 9999 --until $(( end - tail )) \
    --state "$state/$family" --out "$out" --lr "${LR:-3e-3}" --long-every "$long" --workers "$workers" \
    "$@" ${FLAGS:-} >>"$out/$family.log" 2>&1
}

train() { # FAMILY LONG_EVERY WORKERS FLAG..
  rm -f "$state/$1/steps"
  begin "$@" &
  local pid=$! stop=$(( $(date +%s) + compile ))
  while [ ! -e "$state/$1/steps" ] && [ "$(date +%s)" -lt $stop ] && kill -0 $pid 2>/dev/null; do sleep 1; done
  [ -e "$state/$1/steps" ] || kill $pid 2>/dev/null
  wait $pid && return
  [ -e "$out/$1.tar.xz.part0" ] || [ "$(left)" -lt $(( tail + 60 )) ] && return
  rm -rf "${state:?}/$1"
  begin "$@" --no-compile --rows 32 &
  wait $!
}

for family in $families; do
  case $family in glm) train glm 4 7 & ;; *) train "$family" 8 6 --at-a-time 32 & ;; esac
done
wait
for family in $families; do
  echo "== $family"
  grep 'tok/s\|{.sum\|rror' "$out/$family.log" | tail -15
done
