"""Records, errors and file operations that every other room uses: the messages between actors, the tree of errors,
durable writes, private folders. Imports the standard library only. Begin with `messages` and `errors`.
"""
