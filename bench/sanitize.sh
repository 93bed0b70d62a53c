#!/usr/bin/env bash
# memcheck, racecheck and synccheck over small runs of every kernel family: bash bench/sanitize.sh [OUT]
#
# Runs the debug flavour of the cubins (build/cubins-debug, made here if it is not there), whose kernels
# trap where they find an error, and whose warps leave a stage lane by lane, which racecheck can follow.
# Ends within about 150 s. Exits 1 if a tool reports anything; the logs lie in OUT.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-build/sanitize}
mkdir -p "$out"
if [ ! -f build/cubins-debug/MANIFEST.json ]; then
  $python -m moet.kernels.build --debug --arch sm90a moe stream_gemm moe_decode moe_pair prefill_gemm \
    short_stream choose_entries row_attention chunk_attention hyper_connection || exit 1
fi
failed=0
for tool in memcheck racecheck synccheck; do
  start=$SECONDS
  timeout 60 compute-sanitizer --tool $tool --report-api-errors no --print-limit 20 --error-exitcode 9 \
    $python -m bench.sanitize >"$out/$tool.log" 2>&1
  code=$?
  [ $code -eq 0 ] || failed=1
  echo "$tool: exit $code after $((SECONDS - start)) s; $(grep -c ' ok$' "$out/$tool.log") cases ended;" \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/$tool.log" | tail -1)"
  grep -E 'Race reported|Invalid|Barrier error|hazard|Traceback|Error:' "$out/$tool.log" |
    sed -E 's/^=+ *//; s/0x[0-9a-f]+//g; s/\([0-9]+,[0-9]+,[0-9]+\)//g' | sort | uniq -c | sort -rn | head -6
done
exit $failed
