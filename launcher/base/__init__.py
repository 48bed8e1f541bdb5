"""Records, errors and file operations that every other room uses: the messages between actors, the tree of errors,
durable writes, private folders, and the order of the prompts, which the trainer and the audit of its ledger share.
Imports the standard library only. Begin with `messages` and `errors`.
"""
