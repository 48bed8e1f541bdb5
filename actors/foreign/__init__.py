"""Supervises another project's trainer as a command: rung A of docs/adapters.md.

Begin with `foreign_supervisor`, the loop. What a trainer's output and folders mean is for its adapter
(`launcher.adapters`) to say; what follows from it, for the policies. May import every other room of `actors`.
"""
