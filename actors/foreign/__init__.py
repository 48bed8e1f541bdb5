"""Supervises another project's trainer: rungs A and B of docs/adapters.md.

Begin with `foreign_supervisor`, the loop around its command. What a trainer's output and folders mean is for its
adapter (`launcher.adapters`) to say; what follows from it, for the policies. Where it asks the launcher's servers, the
`door` is what it asks, and `fleet` is the Coordinator behind it. May import every other room of `actors`.
"""
