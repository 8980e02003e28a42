#!/usr/bin/env bash
# Measures a card for GPU_SECONDS, 570 without it, in the root of a checkout that prepare.py has prepared: README.md.
#
# If nothing can work it ends at once with status 3, so that time is left for another try (GPU_GO_ON=1 goes on).
# Called again, it goes on where it ended.
set -uo pipefail
begin=$SECONDS; total=${GPU_SECONDS:-570}
less() { local n=$((total - (SECONDS - begin) - $2)); echo $((n < $1 ? n : $1)); }  # at most $1 s, with $2 s left over
say() { echo "=== $((SECONDS - begin)) s: $*"; }
python=${GPU_PYTHON:-python3}
kept=${GPU_KEPT:-/tmp/d2_memfit_gpu}   # outlasts a call, where OUT does not
out=${OUT:-.gpu/out}
mkdir -p "$kept" "$out"
cp "$kept"/* "$out"/ 2>/dev/null || cp .gpu/card/*.jsonl "$out"/
site=$PWD/.site:; [ -z "${GPU_REHEARSE:-}" ] || site=
export PYTHONPATH=$site$PWD:$PWD/tools PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
exec > >(tee -a "$out/log.txt") 2>&1; writer=$!
keep() { cp "$out"/*.jsonl "$out"/log.txt "$kept"/ 2>/dev/null; }
end() { keep; rm -f "$out/tested"; exec > /dev/null 2>&1; wait "$writer"; exit "$1"; }
# A step: its seconds at most, then its command. Interrupted, it still writes; 8 s later it is killed.
step() { local most=$1 status; shift; [ "$most" -ge 8 ] || { say "no time for: $*"; return 0; }
    say "$most s at most: $*"; timeout -s INT -k 8 "$most" "$@"; status=$?; say "status $status"; keep; return $status; }

say "$(nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader 2>&1 | tail -1); $(nproc) cores"
[ -e "$kept/tested" ] || {
    step "$(less "${GPU_FIRST:-110}" 10)" "$python" -m gpu_call.call first || [ -n "${GPU_GO_ON:-}" ] || { say "nothing can work yet"; end 3; }
    touch "$kept/tested"
    step "$(less "${GPU_TESTS:-80}" 60)" "$python" -m pytest -p no:cacheprovider -m gpu tests/gpu -q --durations=8 --tb=short; }
measure() { local n; n=$(less "$1" "$2"); [ "$n" -lt 20 ] && return
    step "$((n + 12))" "$python" -m d2_memfit measure-gpu --device "${GPU_DEVICE:-cuda:0}" --output "$out" --minutes "$("$python" -c "print($n / 60)")"; }
rest() { local n; n=$(less "$1" "$2"); step "$n" "$python" -m gpu_call.call rest "$out" "$((n - 6))" ${GPU_ITEMS:-}; }
measure "${GPU_MEASURE:-285}" 40
rest "${GPU_REST:-150}" 25
[ "${GPU_MEASURE:-1}" = 0 ] || measure 600 32
rest 100 10
say "the end"
"$python" -m gpu_call.call table "$out"
end 0
