"""`python -m launcher -m …`: one setting after the other, each as a run of its own, and what they came to."""
