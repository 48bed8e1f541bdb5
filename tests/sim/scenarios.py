"""What befalls a simulated run: each a coroutine function that gets the run."""

import asyncio


async def nothing(run):
    pass


async def a_server_is_killed(run):
    await run.until(3)
    run.servers["server-1"].kill()


async def all_servers_are_killed(run):
    await run.until(4)
    for server in run.servers.values():
        server.kill()


async def all_servers_hang(run):
    await run.until(4)
    for server in run.servers.values():
        server.hang()


async def the_trainer_is_killed(run):
    await run.until(5)
    run.trainer.kill()


async def trainer_and_server_at_once(run):
    await run.until(4)
    run.trainer.kill()
    run.servers["server-0"].kill()


async def the_monitor_is_killed(run):
    await run.until(2)
    run.monitor.kill()
    await run.until(7)
    run.monitor.kill()


async def the_coordinator_is_killed_with_the_trainer(run):
    await run.until(5)
    run.coordinator.kill()
    run.trainer.kill()


async def a_start_fails(run):
    await run.until(3)
    run.servers["server-1"].breaks_starts = 1
    run.servers["server-1"].kill()


async def the_judge_breaks(run):
    """It answers 0 to everything for half a minute."""
    await run.until(5)
    run.is_judge_broken = True
    await asyncio.sleep(30.0)
    run.is_judge_broken = False
    run.changed.set()


SCENARIOS = (
    nothing,
    a_server_is_killed,
    all_servers_are_killed,
    all_servers_hang,
    the_trainer_is_killed,
    trainer_and_server_at_once,
    the_monitor_is_killed,
    the_coordinator_is_killed_with_the_trainer,
    a_start_fails,
    the_judge_breaks,
)
