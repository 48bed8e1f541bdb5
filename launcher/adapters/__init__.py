"""Adapters: what the launcher has to know of another project's trainer to supervise it (docs/adapters.md).

Begin with `trainer_adapter`, the interface. Nothing here starts a process: `actors/foreign` does. May import
`launcher.checkpoints` and the rooms below it.
"""
