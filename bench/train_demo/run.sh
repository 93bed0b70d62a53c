#!/usr/bin/env bash
# Train one demo model further on the first GPU and score both on the processor:
#   run.sh FAMILY TRAIN_S SCORE_S STATE_FOLDER OUT_FOLDER [more flags of bench.train_demo.train]
# The other family is scored while this one trains. Leaves OUT/FAMILY.tar.xz.part* (the export),
# OUT/quality-*.json and logs. Falls back to uncompiled blocks.
set -u
family=$1 train_s=$2 score_s=$3 state=$4 out=$5
shift 5
python=${PYTHON:-python3} cores=$(nproc)
other=glm
[ "$family" = glm ] && other=deepseek-v4
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$state/inductor OMP_NUM_THREADS=1
mkdir -p "$out" "$state"
begin=$SECONDS exported=$out/$family.tar.xz.part0
jobs=$(( cores * 3 / 8 )) workers=$(( cores * 7 / 16 ))

score() { # NAME FOLDER JOBS SECONDS
  "$python" -m bench.quality "$1=$2" --fresh --texts 2 --jobs "$3" --deadline-s "$4" \
    --out "$out/quality-$1.json" >"$out/quality-$1.log" 2>&1
}

train() { # SECONDS, more flags
  CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=4 "$python" -m bench.train_demo.train "$family" \
    --size narrow --checkpoint "moet/demo/$family" --total 9999 --seconds "$1" \
    --state "$state/$family" --out "$out" --workers "$workers" "${@:2}" >>"$out/$family.log" 2>&1
}

score "$other" "moet/demo/$other" "$jobs" "$(( train_s - 10 ))" &
(
  train "$train_s" "$@" && exit
  left=$(( train_s - (SECONDS - begin) ))
  echo "== again, not compiled, $left s" >>"$out/$family.log"
  [ -e "$exported" ] || [ "$left" -lt 60 ] || train "$left" "$@" --rows 32 --no-compile
) &
trainer=$!
while kill -0 $trainer 2>/dev/null && [ ! -e "$exported" ]; do sleep 1; done
if [ -e "$exported" ]; then
  sleep 2
  score "$family" "$state/$family/export" "$cores" "$score_s"
fi
wait
for log in "$out/$family.log" "$out"/quality-*.log; do
  echo "== $log"
  tail -c 3000 "$log"
done
