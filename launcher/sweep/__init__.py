"""`python -m launcher -m …`: runs one combination of settings after the other, each as a separate run, and compares.

May import everything of the launcher but the driver and `__main__`, and none of actors; a trial is a child process
with the ordinary command. Begin with `sweep_command.run_sweep`; `sweep_run` starts the trials, `trial_results` reads
what became of them.
"""
