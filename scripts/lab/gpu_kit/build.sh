#!/usr/bin/env bash
# Collects in .gpu_kit/ what a bare GPU machine lacks: two archives and the command for it, 48 MiB (docs/gpu.md).
#
#     bash scripts/lab/gpu_kit/build.sh        about 6 minutes on two cores; 5 GB in .gpu_kit_work/
#
# Needs pip with a registry, nvcc, xz, binutils, c++filt, and the project's own environment ($PYTHON, else
# .venv/bin/python) to compile SGLang's kernels ahead. Where that fails they are compiled on the GPU machine.
set -euo pipefail
cd "$(dirname "$0")/../../.."
repo=$PWD
kit=$repo/scripts/lab/gpu_kit
out=$repo/.gpu_kit
work=${KIT_BUILD:-$repo/.gpu_kit_work}
python=${PYTHON:-$repo/.venv/bin/python}
[ -x "$python" ] || python=python3
mkdir -p "$work/wheels" "$out"
said() { echo "[$SECONDS s] $*"; }
quietly() { "$@" 2>&1 | grep -v 'is ignored' || true; } # pip warns of what a --target lacks; the count below decides

# 1. Wheels for Python 3.12, at the pins of constraints.txt.
sed 's/#.*//' "$kit/packages.txt" | tr -s ' ' '\n' | grep . | while read -r name; do
    pattern="^${name//[-_.]/[-_.]}=="
    grep -i -E "$pattern" constraints.txt || { echo "$name has no pin in constraints.txt" >&2 && exit 1; }
done >"$work/pins.txt"
tags=(--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
tags+=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for n in 5 17 24 26 27 28 31 34 35 39; do tags+=(--platform "manylinux_2_${n}_x86_64"); done
grep -v antlr4 "$work/pins.txt" >"$work/binary.txt" # antlr4 has no wheel
quietly python3 -m pip download -q --no-deps -d "$work/wheels" "${tags[@]}" -r "$work/binary.txt"
compgen -G "$work/wheels/antlr4*" >/dev/null ||
    quietly python3 -m pip wheel -q --no-deps -w "$work/wheels" "$(grep antlr4 "$work/pins.txt")"
rm -rf "$work/site"
mkdir -p "$work/site"
quietly python3 -m pip install -q --no-index --no-deps --no-compile --find-links "$work/wheels" --target "$work/site" \
    "${tags[@]}" -r "$work/pins.txt"
if [ "$(compgen -G "$work/site/*.dist-info" | wc -l)" -ne "$(wc -l <"$work/pins.txt")" ]; then
    echo "some packages are missing in $work/site: see $work/pins.txt" >&2
    exit 1
fi
said "site: $(du -sm "$work/site" | cut -f1) MB"

# 2. Left out: what a run of the launcher never calls.
cd "$work/site"
rm -rf ray/{jars,rllib,tune,serve,llm,workflow,train,cpp} ray/data/{_internal,examples,datasource,preprocessors}
rm -rf ray/dashboard/client ray/core/libjemalloc.so
rm -rf sglang/{multimodal_gen,test,benchmark,eval} sglang/srt/{server,grpc,multimodal}/_core*.so
rm -rf sgl_kernel/{sm100,infllm_ops*,flashmla_ops*,spatial_ops*}
rm -rf xgrammar/lib flashinfer/data torchao/*.so wandb/bin test tests bin/normalizer
find . -name tests -type d -path '*/tests' -not -path './ray/*' -prune -exec rm -rf {} +
find . -path '*.dist-info/*' \( -iname 'licen*' -o -iname 'notice*' \) -prune -exec rm -rf {} +
# xgrammar and tvm_ffi find their libraries by their RECORD
find . -path '*.dist-info/RECORD' -not -path './xgrammar*' -not -path './apache_tvm_ffi*' -delete

# 3. One architecture, two head sizes, no symbols.
for library in sgl_kernel/sm90/common_ops.abi3.so sgl_kernel/flash_ops.abi3.so; do
    options=()
    [[ $library == *flash* ]] && options=(--flash)
    python3 "$kit/slim.py" "$library" "$library.slim" "${options[@]}"
    mv "$library.slim" "$library"
done
binary=(-name '*.so' -o -name '*.so.*' -o -name raylet -o -name gcs_server -o -name py-spy)
# strip would undo the holes of the libraries that were cut above
find . -type f \( "${binary[@]}" \) -not -path './sgl_kernel/*' -print0 |
    xargs -0 -n 1 strip --strip-unneeded 2>/dev/null || true

# 4. Stand-ins of what is imported and not used.
mkdir -p IPython
cat >IPython/__init__.py <<'EOF'
"""A stand-in: SGLang and Ray import names that notebooks use."""


def get_ipython():
    return None
EOF
cat >IPython/display.py <<'EOF'
def display(*_, **__):
    pass


class HTML:
    def __init__(self, data=None, **_):
        self.data = data
EOF
echo '"""A stand-in: SGLang imports it for speech."""' >soundfile.py
said "slim: $(du -sm . | cut -f1) MB"

# 5. SGLang's kernels, compiled for sm_90a.
if [ ! -d "$work/jit" ]; then
    home=
    for one in "${CUDA_HOME:-}" /usr/local/cuda; do
        [ -z "$home" ] && [ -e "$one/lib64/libcudart.so" ] && home=$one
    done
    (cd "$repo" && CUDA_HOME=$home PATH="$(dirname "$python"):$PATH" "$python" -m scripts.lab.gpu_kit.jit "$work/jit" 2>&1) |
        grep -E 'ok|Error' || echo "no kernel was compiled ahead" >&2
fi
rm -rf jit
mkdir -p jit
[ ! -d "$work/jit" ] || cp -r "$work/jit/." jit/
said "kernels: $(find jit -name '*.so' | wc -l)"

# 6. Two archives: xz packs machine code better with a filter that spoils text.
find . -type f \( "${binary[@]}" \) | sort >"$work/binaries"
find . \( -type f -o -type l \) -not -name '*.pyc' | sort | grep -vxFf "$work/binaries" >"$work/texts"
rm -f "$out"/*
tar -S -cf - -T "$work/binaries" | nice xz --x86 --lzma2=preset=9,dict=192MiB >"$out/binaries.tar.xz" &
tar -cf - -T "$work/texts" | nice xz --lzma2=preset=9,dict=64MiB >"$out/texts.tar.xz"
wait $!
cd "$repo"
# shellcheck disable=SC2016 # expanded where it runs
echo 'exec bash "$(dirname "$0")/../scripts/lab/gpu_kit/run_gpu.sh" "$@"' >"$out/run_gpu.sh"
ls -l "$out"
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb 2>/dev/null | awk '/\ttotal$/ {sum += $1} END {print sum}')
bytes=$((tree + $(du -sb "$out" | cut -f1)))
said "$(awk "BEGIN {printf \"%.1f\", $bytes / 1048576}") MiB with the tracked tree; a transfer takes 64"
