"""The kit for a bare GPU machine: what it lacks, in two archives, and a script that runs the smoke there (docs/gpu.md).

    build.sh     here: wheels (packages.txt), cut (slim.py), kernels compiled ahead (jit.py) → .gpu_kit/
    rehearse.sh  here, on a CPU: an environment as that machine's (bare.txt), no network, the very script
    run_gpu.sh   there: unpack.py, imports.py, ceilings.py, and the parts of scripts.gpu_smoke

May import `scripts.lab.gpu_smoke`'s commands only by starting them: unpack.py runs before any package is there.
"""
