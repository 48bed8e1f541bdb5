#!/usr/bin/env bash
# The GPU machine, as far as it can be had here: Python 3.12 with the packages of bare.txt, no network, a HOME of its
# own, the tree as a transfer brings it. Runs the very script, on the CPU with the tiny model.
#
#     bash scripts/lab/gpu_kit/rehearse.sh [SECONDS [PART …]]     after build.sh; 15 minutes on two quiet cores
#
# The environment, 6 GB, stays in $KIT_BARE (default /tmp/kit_bare). $PYTHON312: the interpreter, else python3.12. Needs
# root (a network namespace) and gcc. "facts" ends with exit code 4 here: the doctor finds no GPU. The tables must have
# nothing but ok and skipped, the imports none that failed; the last part must end in SGLang's "No accelerator", and in nothing that the launcher refuses. It needs 13 GiB in $KIT_ROOM
# (default /tmp/kit_rehearsal).
set -euo pipefail
cd "$(dirname "$0")/../../.."
repo=$PWD
kit=$repo/scripts/lab/gpu_kit
bare=${KIT_BARE:-/tmp/kit_bare}
room=${KIT_ROOM:-/tmp/kit_rehearsal}
seconds=${1:-560}
shift || true
if [ ! -x "$bare/bin/python3" ]; then
    "${PYTHON312:-python3.12}" -m venv "$bare"
    "$bare/bin/pip" install -q --no-compile -r "$kit/bare.txt"
    # what others brought and that machine has not
    "$bare/bin/pip" uninstall -q -y pydantic pydantic-core annotated-types typing-inspection tzdata
fi
rm -rf "$room"
mkdir -p "$room/tree" "$room/home" "$room/out" "$room/stub"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\0' "$file"
done | tar --null -cf - -T - | tar -xf - -C "$room/tree"
cp -r .gpu_kit "$room/tree/"
echo "what a transfer would carry: $(du -sb "$room/tree" | awk '{printf "%.1f MiB", $1 / 1048576}') of 64"
echo 'int cuPointerGetAttribute(void) { return 100; }' |
    gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -x c - -o "$room/stub/libcuda.so.1"

inside() { # COMMAND [VARIABLE=VALUE …]: no network but loopback
    local command=$1
    shift
    unshare -n env -i HOME="$room/home" OUT="$room/out" PATH="$bare/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        KIT_SITE="$room/site" KIT_WORK="$room/work" SMOKE_MODEL=tiny KIT_STEP_S=400 SMOKE_S="${SMOKE_S:-420}" LARGE_S="${LARGE_S:-420}" "$@" \
        bash -c "ip link set lo up; cd '$room/tree' && $command"
}
inside "bash .gpu_kit/run_gpu.sh --seconds 300 unpack facts"
inside "timeout 300 python3 -m scripts.lab.gpu_kit.imports 2>&1 | tail -30" \
    PYTHONPATH="$room/site:." LD_LIBRARY_PATH="$room/stub" CUDA_HOME=/usr/local/cuda
inside "timeout 400 python3 -m launcher conf=arithmetic_cpu total_train_steps=5 cluster.fileroot=$room/five 2>&1 | tail -15" \
    PYTHONPATH="$room/site"
inside "bash .gpu_kit/run_gpu.sh --seconds $seconds ${*:-smoke large}"
ls -l "$room/out"
[ -z "${NO_FAKE:-}" ] || exit 0

# The settings for a GPU, up to the first call of CUDA: the project's stand-in of the driver's library answers as an H100.
gcc -shared -fPIC -o "$room/stub/libnvidia-ml.so.1" tests/programs/nvml_stand_in.c
mkdir -p "$room/out_gpu"
df --output=avail -h "$room" | tail -1
inside "bash .gpu_kit/run_gpu.sh --seconds 420 smoke large" OUT="$room/out_gpu" KIT_WORK="$room/work_gpu" SMOKE_MODEL= \
    KIT_STEP_S=150 SMOKE_S=170 LARGE_S=170 LD_LIBRARY_PATH="$room/stub" \
    NVML_GPUS=1 "NVML_NAME=NVIDIA H100 80GB HBM3" NVML_MEMORY_GIB=79 | cut -c1-250
