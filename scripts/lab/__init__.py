"""The laboratory: what backs a figure of the README or the measurements page. It is not in the wheel.

    fault_bench     what faults cost: runs under faults against whole-job restarts (run_measures, fault_table)
    disturb         what a kill or a stop costs, again and again in one run
    overhead        what the supervision costs, in blocks of steps with and without it (measured_run)
    adapter_storm   what a kill costs another project's trainer, or its servers (foreign_cost, areal_rig, trl_rig)
    compare_losses  the losses of TRL, verl and AReaL beside ours (peer_losses)
    gpu_smoke       the first quarter of an hour on a GPU: `python -m scripts.gpu_smoke` (smoke_models)
    gpu_kit/        the same on a bare GPU machine

`cells` and `measured` are what they share. May import everything below `scripts`; nothing outside it imports it but the
command `scripts.gpu_smoke`.
"""
