"""The laboratory: what backs a figure of the README or the measurements page. It is not in the wheel.

    fault_bench   what faults cost: runs under faults against whole-job restarts
    benchmark     what a kill, a hang and the supervision cost
    gpu_smoke     the first quarter of an hour on a GPU: `python -m scripts.gpu_smoke`

May import everything below `scripts`; nothing outside it imports it but the command `scripts.gpu_smoke`.
"""
