"""A proxy in front of a server that spoils a seeded share of the generations passing through (fault C8)."""

from scripts.faults.fault_proxy import KINDS, FaultProxy

__all__ = ["KINDS", "FaultProxy"]
