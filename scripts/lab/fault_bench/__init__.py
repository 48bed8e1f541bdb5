"""What faults cost, in one command with a time budget: `python -m scripts.lab.fault_bench --help`.

A *cell* is one measurement: a name, an arm, how it is run, its marks. Most call what measures already:

    noop, traps         scripts.storm, with faults that do nothing or must stay unnoticed: each alarm is a false one
    storm, no_standby   scripts.storm, one fault per 10 steps; ours, and ours without the parked trainer
    detectors_off       scripts.storm, ours with three detectors switched off: it must miss its marks
    resume, by_hand     runs.py: the whole job begins again after each fault, from a checkpoint or from step 0
    overhead            scripts.lab.benchmark supervision: paired blocks
    failover            scripts.lab.benchmark failover: a lost server beside another one, and alone
    restores            scripts.lab.benchmark restores: made runs, each with a cause
    storm_5, storm_1, slow_probes, no_kept_tokens, preemption, trainer_kills: with --full alone

Missing here: tokens that a lost server had made and no answer had brought (nobody outside it knows them), hangs of a
trainer within one step, more than one machine.

    cells.py ─► runs.py ─► storm, scripts/lab/benchmark      what is run, how
                   └─► measures.py                       a run's files ─► figures (pure)
    __main__.py ─► verdicts.py ─► results.py             marks; the benchmark's own test; JSON, Markdown, picture
"""
