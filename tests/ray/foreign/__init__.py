"""Runs of another project's trainer on a real Ray."""
