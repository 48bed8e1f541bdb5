"""What stands on both sides of the door: a command that steps, and a test that waits until the door shows something."""

import asyncio

from launcher.base.messages import Health, Verdict
from launcher.policy.observed import TrainerFacts
from tests.support.machine import scaled


def stepping(**facts):
    """A command that steps, as its Coordinator sees it."""
    return TrainerFacts(
        verdict=Verdict(health=Health.HEALTHY, reason="it steps"),
        is_loaded=True,
        is_paused=False,
        policy_version=0,
        lineage=0,
        next_step=0,
        is_command=True,
        **facts,
    )


async def until(holds):
    async with asyncio.timeout(scaled(30.0)):
        while not holds():
            await asyncio.sleep(0.005)
