#!/usr/bin/env bash
# Train demo models further on the first GPU, side by side, from the repository's root:
#   run.sh OUT SECONDS [GO_FILE]
# Leaves OUT/FAMILY.tar.xz.part* (the checkpoint, about SECONDS - TAIL after the start), OUT/FAMILY.json (scores of the
# training graph), OUT/quality-FAMILY.json (some answers of the served model) and logs. Neither family ends the other.
#   FAMILIES  "deepseek-v4 glm"           TAIL    60, the seconds kept for export and scores
#   FLAGS     more for train.py           STATE   a folder for going on
# With a GO_FILE it compiles at once, on few cores, and makes its steps once the file exists, or after 150 s.
set -u
out=$1 seconds=$2 go=${3:-} tail=${TAIL:-60}
families=${FAMILIES:-deepseek-v4 glm} state=${STATE:-/tmp/train_demo} python=${PYTHON:-python3}
begin=$SECONDS
mkdir -p "$out" "$state"
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=3
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
cores() { "$python" -c "import os; c = sorted(os.sched_getaffinity(0)); print(','.join(map(str, c$1)))"; }
all=$(cores "") on=
[ -n "$go" ] && on="taskset -c $(cores "[-6:]")"
left() { echo $(( seconds - (SECONDS - begin) )); }

train() { # FAMILY LONG_EVERY WORKERS
  local how limit
  for how in "" "--no-compile --rows 32"; do
    limit=$(( $(left) - tail ))
    [ $limit -lt 60 ] && break
    echo "== $1 $how: $limit s" >>"$out/$1.log"
    TORCHINDUCTOR_CACHE_DIR=$state/inductor-$1 timeout -k 2 "$(left)" $on "$python" -m bench.train_demo.train "$1" \
      --size narrow --checkpoint "moet/demo/$1" --total 9999 --seconds $limit --state "$state/$1" --out "$out" \
      --lr 3e-3 --long-every "$2" --workers "$3" ${go:+--wait-for "$go"} $how ${FLAGS:-} >>"$out/$1.log" 2>&1 && break
    [ -e "$out/$1.tar.xz.part0" ] && break
    rm -rf "${state:?}/$1"
  done
}

score() { # FAMILY, as far as time reaches
  while [ ! -e "$out/$1.tar.xz.part0" ] && [ "$(left)" -gt 20 ]; do sleep 0.5; done
  sleep 1
  [ -e "$out/$1.tar.xz.part0" ] && CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 timeout "$(left)" "$python" -m bench.quality \
    "$1=$state/$1/export" --fresh --only official --questions 32 --texts 1 --deadline-s $(( $(left) - 5 )) \
    --out "$out/quality-$1.json" >"$out/quality-$1.log" 2>&1
}

if [ -n "$go" ]; then
  ( while [ ! -e "$go" ] && [ $(( SECONDS - begin )) -lt 150 ]; do sleep 0.2; done
    touch "$go"
    for pid in $(pgrep -f "bench.train_demo.train .*--wait-for $go"); do # now the other cores, too
      for one in $pid $(pgrep -P "$pid"); do taskset -apc "$all" "$one"; done
    done >/dev/null 2>&1 ) &
fi
for family in $families; do
  case $family in glm) train glm 4 6 & ;; *) train "$family" 8 5 & ;; esac
  score "$family" &
done
wait
for family in $families; do
  echo "== $family"
  grep 'tok/s\|{.sum\|rror' "$out/$family.log" | tail -15
  tail -3 "$out/quality-$family.log" 2>/dev/null
done
