"""The data: records from files or the hub, prompts made of them, and the queue that decides which come next.

May import the launcher's rooms below `actors` only, and neither torch nor ray. Begin with `dataset`, then
`prompt_queue`.
"""
