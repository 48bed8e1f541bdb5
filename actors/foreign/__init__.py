"""Another project's trainer as the trainer of the one Coordinator: rungs A and B of docs/adapters.md.

Begin with `command_trainer`, which runs and reads its command, and `command_cluster`, through which the Coordinator
sees and orders it. What a trainer's output and folders mean is for its adapter (`launcher.adapters`) to say; what
follows from it, for the policies. Where it asks the launcher's servers, the `door` is what it asks, and the `fleet` is
behind it. May import every other room of `actors`.
"""
