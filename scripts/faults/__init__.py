"""Faults injected into a live run from outside: the parts of `scripts.inject_fault` and `scripts.storm`.

Begin with `declaration`, which says how a kind is declared; each kind is declared where it is brought about
(`server_faults`, `trainer_faults`, `disk_faults`, `memory_faults`, `reward_faults`, `run_faults`), and
`kinds` has them all. `schedule` decides when one comes, `campaign` brings a list of them about, `outcome` reads what
became of each. `run_processes` finds the processes of a live run, for other tools too. May import everything below
`scripts`.
"""
