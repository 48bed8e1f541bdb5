"""The model that learns: GRPO's loss, forward and backward passes, the optimizer, its state on disk, its ranks' slices.

May import `actors.serving` and the launcher's rooms below `actors`; no Ray here. Begin with `policy_model`, then
`objective` (one batch) and `grpo` (the formulas).
"""
