#!/usr/bin/env bash
# Records FOLDER.cast, a run in a terminal with faults injected from outside, and draws docs/storm_cast.svg from it.
#
#     bash docs/record_cast.sh FOLDER [SETTING…]        FOLDER: of the run, new
#
# Needs asciinema 2 (Debian's package) and svg-term (npm's svg-term-cli). Nothing is cut out; ten seconds play in one, with
# a frame for each two seconds (each second would make the picture twice as large). The folders of this machine have
# other names.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
python=${PYTHON:-.venv/bin/python}
run="experiment_name=cast trial_name=t0 cluster.fileroot=$folder"

(
    until compgen -G "$folder/logs/*/cast/t0/ledger.jsonl" >/dev/null; do sleep 1; done
    "$python" -m scripts.inject_fault --fileroot "$folder" C1@8 C2@20 T1@32
) >"$folder.faults" 2>&1 &
faults=$!
trap 'kill "$faults" 2>/dev/null || true' EXIT
asciinema rec --quiet --overwrite --cols 110 --rows 34 --title "a run, and three faults" \
    --command "stty cols 110 rows 34; '$python' -m launcher conf=arithmetic_cpu sglang.n_servers=2 $run $*" "$folder.cast"
wait "$faults" || cat "$folder.faults"

"$python" - "$folder" "$PWD/" <<'END'
"""One frame for each two seconds, ten times as fast."""
import json, sys

folder, checkout = sys.argv[1:]
header, *events = [json.loads(line) for line in open(f"{folder}.cast")]
frames = {}
for at, _, text in events:
    second = int(at) // 2 * 2
    frames[second] = frames.get(second, "") + text
with open(f"{folder}.frames", "w") as file:
    print(json.dumps({key: header[key] for key in ("version", "width", "height", "title")}), file=file)
    for second, text in frames.items():
        text = text.replace(checkout, "").replace(folder, "outputs/cast")
        print(json.dumps([second / 10, "o", text]), file=file)
    print(json.dumps([max(frames) / 10 + 4, "o", "\x1b[0m"]), file=file)  # the end is shown for four seconds
END
svg-term --in "$folder.frames" --out docs/storm_cast.svg --window --no-cursor
