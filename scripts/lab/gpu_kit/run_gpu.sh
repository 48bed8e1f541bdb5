#!/usr/bin/env bash
# On the GPU machine, in the project's root:  bash .gpu_kit/run_gpu.sh [--seconds N] [PART …]
#
# Parts, in this order unless they are named: unpack facts imports smoke large oom. Each has a limit of its own, and what
# it wrote is in $OUT whatever happens: summary.txt (with the tables), facts.txt, parts.txt (what the parts printed),
# gpu.csv (every two seconds), smoke.tar.gz, large.tar.gz, oom.tar.gz (logs). Nothing of the GPU is set.
#
#   smoke   scripts.gpu_smoke of a small shape, but for memory that runs out; again with safer settings where it fails
#   large   scripts.gpu_smoke --large
#   oom     scripts.gpu_smoke's start, C9 and T8
#
# $SETTINGS: more settings of the runs. $SMOKE_S, $LARGE_S: limits in seconds. $SMOKE_MODEL: as --model has it.
set -u
kit=$(cd "$(dirname "$0")" && pwd)
archives=$PWD/.gpu_kit
seconds=560
[ "${1:-}" = --seconds ] && seconds=$2 && shift 2
parts=${*:-unpack facts imports smoke large oom}
OUT=${OUT:-/tmp/out}
site=${KIT_SITE:-/tmp/site}
work=${KIT_WORK:-/tmp/kit}
step_s=${KIT_STEP_S:-150}
mkdir -p "$OUT" "$work"
export PYTHONUNBUFFERED=1 PYTHONPATH=$site:$PWD
unset PYTHONDONTWRITEBYTECODE # sglang alone is 2,000 files, and each process would compile them
python=$(command -v python3)
mark=GRPO_KIT_MARK=$$
gpu=$(command -v nvidia-smi || true)

# ── of each part ──

left() { echo $((seconds - SECONDS)); }
say() { echo "[$SECONDS s] $*" | tee -a "$OUT/summary.txt"; }

limited() { # SECONDS NAME COMMAND…: ended by INT, then KILL
    local most=$1 name=$2 file=$OUT/parts.txt
    shift 2
    case $name in facts | imports) file=$OUT/facts.txt ;; esac
    [ "$most" -gt "$(left)" ] && most=$(left)
    if [ "$most" -lt 5 ]; then
        say "$name: no time left"
        return 125
    fi
    env "$mark" timeout -s INT -k 20 "$most" "$@" >>"$file" 2>&1
    local code=$?
    say "$name: exit code $code (of at most $most s)"
    return $code
}

own() { # pids of what `limited` has started and that is still there: by the mark in their environment
    local file
    for file in /proc/[0-9]*/environ; do
        { tr '\0' '\n' <"$file"; } 2>/dev/null | grep -qx "$mark" && basename "$(dirname "$file")"
    done
}

sweep() { # after a part: 10 s to end by itself, then by pid
    local pid
    for _ in 1 2 3 4 5; do
        [ -z "$(own)" ] && return
        sleep 2
    done
    for pid in $(own); do
        say "ended by pid: $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-80)"
        kill -9 "$pid" 2>/dev/null
    done
}

keep() { # PART: logs and results of its folders and of Ray without weights, where they are at most 15 MB
    local names=()
    compgen -G "$work/$1*/" >/dev/null || return
    for name in jsonl log md json txt yaml out err; do names+=(-o -name "*.$name"); done
    find -H "$work/$1"*/ /tmp/grpo-ray-*/ray/session_latest/logs -type f \( "${names[@]:1}" \) -size -3M \
        -not -path '*model/*' -not -path '*/checkpoints/*' 2>/dev/null |
        head -600 | tar -czf "$work/$1.tar.gz" -T - 2>/dev/null
    [ "$(stat -c %s "$work/$1.tar.gz" 2>/dev/null || echo 0)" -lt 15000000 ] && cp "$work/$1.tar.gz" "$OUT/"
}

keep_all() { for one in smoke large oom; do keep "$one"; done; }

keep_on() { while sleep 15; do keep_all; done; } # what a call that is cut off leaves

keep_on &
background=$!
if [ -n "$gpu" ]; then
    nvidia-smi --query-gpu=timestamp,memory.used,utilization.gpu,clocks.sm,power.draw --format=csv,noheader -l 2 \
        >>"$OUT/gpu.csv" 2>&1 &
    background="$background $!"
fi
# shellcheck disable=SC2086,SC2154
trap 'kill $background 2>/dev/null; keep_all; say "end, $(left) s left"' EXIT

toolkit() { # what links kernels: an nvcc on PATH may be a wrapper in a folder without libraries
    local one by_path
    by_path=$(readlink -f "$(command -v nvcc 2>/dev/null || echo /x/y/z)")
    for one in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-13* "$(dirname "$(dirname "$by_path")")"; do
        [ -n "$one" ] && [ -x "$one/bin/nvcc" ] && [ -e "$one/lib64/libcudart.so" ] && echo "$one" && return
    done
}

# ── the parts ──

unpack() { # what came with this call; it stays while the machine is held
    local one name pids=()
    mkdir -p "$site"
    for one in "$archives"/*.tar.xz; do
        name=$(basename "$one")
        [ -e "$one" ] && [ ! -e "$site/.$name" ] || continue
        { "$python" "$kit/unpack.py" "$one" "$site" && touch "$site/.$name"; } &
        pids+=($!)
    done
    for one in "${pids[@]}"; do
        wait "$one" || {
            say "unpack failed"
            return 1
        }
    done
    mkdir -p ~/.cache/tvm-ffi
    cp -rn "$site/jit/." ~/.cache/tvm-ffi/ 2>/dev/null
    cp "$site/bin/py-spy" "$(dirname "$("$python" -c 'import sys; print(sys.executable)')")/" 2>/dev/null
    (cd "$site" && nice timeout 60 "$python" -m compileall -q -j 0 sglang transformers ray >/dev/null 2>&1) &
    say "unpack: $(du -sm "$site" | cut -f1) MB in $site"
}

about_the_machine() {
    local versions='^(torch|triton|transformers|tokenizers|numpy|ray|sglang|huggingface|safetensors|protobuf|pydantic) '
    date -u
    uname -r
    nproc
    free -g
    df -h / /tmp /dev/shm
    ulimit -a | grep -E 'processes|open files|locked'
    cat /etc/hosts
    hostname
    ip -brief addr 2>/dev/null
    nvidia-smi
    nvidia-smi --query-gpu=name,memory.total,compute_mode,mig.mode.current,driver_version,power.limit --format=csv
    command -v nvcc gcc g++ ninja ldconfig
    nvcc --version | tail -2
    ls -l "$(command -v nvcc)" /usr/local | head -20
    echo "toolkit: $(toolkit)"
    "$python" -V
    "$python" -m pip list 2>/dev/null | grep -iE "$versions"
    "$python" -c "import os, sysconfig; h = sysconfig.get_paths()['include']; print(h, os.path.exists(h + '/Python.h'))"
    env -u CUDA_HOME "$python" -c "
import os
from launcher.resources import toolchain
print('the launcher finds', toolchain.find_toolkit(os.environ), repr(toolchain.why_no_toolkit(os.environ)))" 2>&1 | tail -1
}

facts() {
    about_the_machine >>"$OUT/facts.txt" 2>&1
    if [ -n "$gpu" ]; then
        if [ "$(awk '/MemTotal/ {print int($2 / 1048576)}' /proc/meminfo)" -lt 100 ]; then
            # memory that comes as it is used: asked for once, so that plans and Ray's monitor see it
            timeout 40 "$python" -c "import torch; [torch.ones(4 << 30, dtype=torch.uint8) for _ in range(12)]"
        fi
        [ "$(df --output=avail -k /dev/shm | tail -1)" -lt 30000000 ] && mount -o remount,size=80G /dev/shm
        # does a kernel compile as a run would have it, with no variable of this kit's? beside what follows
        env -u CUDA_HOME TVM_FFI_CACHE_DIR="$work/jit" timeout 100 "$python" -c "
import time, torch
began = time.time()
from sglang.kernels.ops.attention.clamp_position import clamp_position_cuda
print(clamp_position_cuda(torch.tensor([5, 0], device='cuda')), time.time() - began)" &
        limited 60 facts "$python" -m scripts.lab.gpu_kit.ceilings
    fi >>"$OUT/facts.txt" 2>&1
    limited 60 facts "$python" -m launcher doctor
}

imports() {
    if [[ $parts == *large* ]]; then # beside it, since imports leave the GPU alone
        large_model &
        making=$!
    fi
    limited 120 imports "$python" -m scripts.lab.gpu_kit.imports
}

started() { # FOLDER: did its run take a step?
    "$python" -c "
import json, sys
sys.exit(not any(part['figures'].get('start_s') for part in json.load(open(sys.argv[1]))['parts']))" \
        "$1/results.json" 2>/dev/null
}

why_not() { # FOLDER: the ends of the logs of a run that took no step
    local file
    {
        echo "== the end of parts.txt"
        tail -4 "$OUT/parts.txt" | cut -c1-500
        for file in "$1"/*/console.log "$1"/*/logs/*/*/*/{llm_server-0,trainer}.log; do
            [ -e "$file" ] || continue
            echo "== ${file#"$work"/}"
            grep -vE 'Warning|^ *$' "$file" | tail -25 | cut -c1-300
        done
    } >>"$OUT/summary.txt"
}

smoke_once() { # NAME FOLDER SECONDS WORD…: the command, its table, and why it took no step; fails in that case
    local name=$1 folder=$2 most=$3 settings
    shift 3
    settings=$(cat "$work/settings" 2>/dev/null)
    [[ $settings == *triton* ]] && export SGLANG_IS_FLASHINFER_AVAILABLE=false
    # shellcheck disable=SC2086
    limited "$most" "$name" "$python" -m scripts.gpu_smoke --output "$folder" --step-s "$step_s" \
        --minutes "$(awk "BEGIN {print ($most - 20) / 60}")" "$@" ${SMOKE_MODEL:+--model $SMOKE_MODEL} $settings ${SETTINGS:-}
    sweep
    keep "$name"
    [ -e "$folder/results.md" ] && cat "$folder/results.md" >>"$OUT/summary.txt"
    started "$folder" && return
    why_not "$folder"
    return 1
}

TRITON="sglang.attention_backend=triton +sglang.extra_args.sampling-backend=pytorch"
smoke_of() { # NAME PARTS: again with safer settings where the run takes no step; what served is kept for later parts
    local name=$1 parts_of=$2 until=$((SECONDS + ${SMOKE_S:-230})) n=0 most settings
    rm -rf "${work:?}/$name"[0-9]*
    for settings in "$(cat "$work/settings" 2>/dev/null)" "$TRITON" "$TRITON +sglang.extra_args.disable-cuda-graph=true"; do
        n=$((n + 1))
        most=$((until - SECONDS))
        [ "$n" -gt 1 ] || [ "$most" -gt "$(left)" ] && most=$(left) # a start is worth all that is left
        [ "$most" -lt 60 ] && break
        say "$name, try $n: ${settings:-as shipped}"
        echo "$settings" >"$work/settings"
        smoke_once "$name" "$work/$name$n" "$most" --parts "$parts_of" && return
    done
    rm -f "$work/settings"
}
smoke() { smoke_of smoke nvml,disk,memory,server_killed,server_oom_host,trainer_oom_host,ledger,tensor; }
oom() { smoke_of oom nvml,disk,server_oom_cuda,trainer_oom_cuda,ledger; }

where_large() { # two checkpoints of 20 GiB must fit, or a smaller shape is taken
    root=$work/large shape=${SMOKE_MODEL:-Qwen/Qwen2.5-1.5B}
    room() { df --output=avail -k "$1" | tail -1; }
    [ "$(room "$work")" -lt 50000000 ] && [ "$(room /dev/shm)" -gt 60000000 ] && root=/dev/shm/large
    [ "$shape" = tiny ] || [ "$(room "$(dirname "$root")")" -gt 48000000 ] || shape=Qwen/Qwen2.5-0.5B
    # as it was before: with the model there, there is less room
    [ ! -e "$work/shape" ] || read -r root shape <"$work/shape"
    echo "$root $shape" >"$work/shape"
}

large_model() {
    local root shape
    where_large
    limited 90 model "$python" -m scripts.gpu_smoke --make-only --model-folder "$root.model" --model "$shape"
}

large() {
    local root shape most
    where_large
    rm -rf "$root"
    [ "$root" = "$work/large" ] || ln -sfn "$root" "$work/large_elsewhere"
    [ -z "$making" ] || wait "$making"
    large_model # which ends at once where it is whole
    most=$(left)
    [ "$most" -gt "${LARGE_S:-280}" ] && most=${LARGE_S:-280}
    SMOKE_MODEL='' smoke_once large "$root" "$most" --large --model-folder "$root.model" --model "$shape"
    rm -rf "$root"/*/checkpoints
}

making=
home=$(toolkit)
[ -n "$home" ] && export CUDA_HOME=$home
say "parts: $parts; CUDA_HOME=${CUDA_HOME:-none}; within $seconds s"
[[ $parts == *unpack* ]] || [ -e "$site/sglang" ] || parts="unpack $parts"
for part in $parts; do
    say "── $part"
    "$part" || say "$part: not whole"
done
sweep
grep -E 'GiB|TB/s|TFLOP|GB/s|imported|failed' "$OUT/facts.txt" | tail -20
cat "$OUT/summary.txt"
