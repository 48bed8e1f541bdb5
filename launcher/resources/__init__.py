"""What a run needs and what the machine has: checks of the configuration, placement on nodes and GPUs, estimates of
memory, and the pre-flight that reports everything that is missing. No torch and no Ray. May import `launcher.base`,
`config`, `policy`, `run_files` and `checkpoints`. Begin with `run_plan`, `preflight` and `node_checks`.
"""
