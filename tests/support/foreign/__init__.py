"""Runs of another project's trainer, and a server in miniature for it."""
