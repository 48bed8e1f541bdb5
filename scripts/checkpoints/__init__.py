"""What the tools for checkpoints share: names of trials, the choice of a checkpoint, what is shown of it."""
