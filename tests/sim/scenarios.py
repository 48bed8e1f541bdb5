"""What befalls a simulated run, and what must hold of it: each row stands for a defect that there was, or could be.

`befalls` is a coroutine function that gets the run. Of every row, whatever befalls it, all that findings_of looks at
must hold too.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from launcher.base.disk_faults import DiskFault
from launcher.base.messages import Cause, ServerState, TerminalStatus
from tests.sim.truth import Policy

FALLS_AT = 36
"""Step: enough are known before it to tell a fall from noise."""
LONG = 18
"""Epochs of three steps: enough are left after a fall to be judged."""

EARNS_A_QUARTER, EARNS_A_HALF = (20, 15, 15, 15), (20, 15, 21, 16)
"""Tokens: large digits earn, small ones do not."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`shows`: events that must come, in this order; `never`: those that must not. `is_harmless`: it is no incident.
    `incidents`: as many as there must be, None: at least one."""

    befalls: Callable
    stands_for: str
    epochs: int = 4
    ends: TerminalStatus = TerminalStatus.FINISHED
    shows: tuple[str, ...] = ()
    never: tuple[str, ...] = ("checkpoint.condemned",)
    is_harmless: bool = False
    incidents: int | None = None

    @property
    def name(self):
        return self.befalls.__name__

    @property
    def is_long(self):
        return self.epochs > 4

    @property
    def falls_at(self):
        """From this step on it is worth to kill somebody."""
        return FALLS_AT if self.is_long else 0


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


async def the_coordinator_is_killed(run):
    await run.until(3)
    run.coordinator.kill()


async def the_coordinator_is_killed_with_the_trainer(run):
    await run.until(5)
    run.coordinator.kill()
    run.trainer.kill()


async def the_coordinator_is_killed_while_a_server_starts(run):
    await run.until(3)
    server = run.servers["server-1"]
    server.kill()
    while server.state is not ServerState.STARTING:
        await asyncio.sleep(0.05)
    run.coordinator.kill()


async def trainer_and_monitor_at_once(run):
    await run.until(5)
    run.trainer.kill()
    run.monitor.kill()


async def a_start_of_each_server_fails(run):
    await run.until(3)
    for server in run.servers.values():
        server.breaks_starts = 1
        server.kill()


async def a_server_starts_no_more(run):
    await run.until(3)
    run.servers["server-1"].breaks_starts = 1000
    run.servers["server-1"].kill()


async def no_server_starts_any_more(run):
    await run.until(3)
    for server in run.servers.values():
        server.breaks_starts = 1000
        server.kill()


async def the_trainer_ends_again_and_again(run):
    while True:
        await run.until(5)
        run.trainer.kill()
        await asyncio.sleep(0.1)


async def a_person_ends_the_run(run):
    await run.until(5)
    run.coordinator.abort("ended by the user")


async def a_person_ends_the_run_and_the_coordinator_is_killed(run):
    await run.until(5)
    run.coordinator.abort("ended by the user")
    while run.coordinator.history.memory.ending is None:
        await asyncio.sleep(0.01)
    run.coordinator.kill()


async def a_server_says_that_it_has_the_weights(run):
    """Its label is right and its weights are not."""
    run.servers["server-0"].lies_at = 4


async def the_judge_breaks(run):
    """It answers 0 to everything for half a minute."""
    await run.until(5)
    run.break_judge()
    await asyncio.sleep(30.0)
    run.mend_judge()


async def the_monitor_is_killed_while_the_judge_is_broken(run):
    await pauses_for_the_judge(run)
    run.monitor.kill()
    await asyncio.sleep(30.0)
    run.mend_judge()


async def both_supervisors_are_killed_while_the_judge_is_broken(run):
    """The Coordinator is there again first."""
    await pauses_for_the_judge(run)
    run.coordinator.kill()
    await asyncio.sleep(0.9)
    run.monitor.kill()
    await asyncio.sleep(30.0)
    run.mend_judge()


async def pauses_for_the_judge(run):
    await run.until(5)
    run.break_judge()
    while not run.events("trainer.paused"):
        await asyncio.sleep(0.1)


async def the_judge_stays_broken(run):
    await run.until(5)
    run.break_judge()


async def the_judge_breaks_late_in_a_run(run):
    await run.until(FALLS_AT)
    run.break_judge()
    await asyncio.sleep(30.0)
    run.mend_judge()


async def the_policy_collapses(run):
    run.truth.damage(once_at(FALLS_AT, Policy(quality=0.0)))


async def the_policy_collapses_behind_a_narrow_gate(run):
    run.config.gate.max_reward_jump = 0.25
    run.config.gate.reward_jump_noise = 3.0
    run.config.reward_health.fall_threshold = 8.0
    run.truth.damage(once_at(FALLS_AT, Policy(quality=0.3)))


async def the_policy_collapses_and_a_restore_fails(run):
    run.trainer.breaks_restores = 1
    run.truth.damage(once_at(FALLS_AT, Policy(quality=0.0)))


async def the_policy_half_collapses(run):
    run.truth.damage(once_at(FALLS_AT, Policy(quality=0.3)))


async def the_policy_rots(run):
    """A little more damaged with each step, until it has been gone back to."""

    def learns(policy, step):
        rots = step >= FALLS_AT and not run.events("checkpoint.condemned")
        return Policy(quality=policy.quality - 0.06) if rots else policy

    run.truth.damage(learns)


async def the_policy_collapses_at_the_same_place(run):
    run.truth.damage(lambda policy, step: Policy(quality=0.0) if step == FALLS_AT else policy)


async def the_policy_writes_one_bad_text(run):
    """Its entropy has collapsed: whatever it is asked, it writes the same, and earns half of what it did."""
    run.truth.damage(once_at(FALLS_AT, Policy(quality=0.5, text=EARNS_A_QUARTER)))


async def the_policy_writes_one_text_that_earns_as_before(run):
    """No reward shows it, and nothing else is looked at."""
    run.truth.learns = once_at(FALLS_AT, Policy(text=EARNS_A_HALF))


async def the_disk_of_checkpoints_is_full(run):
    await fails_for_a_while(run, run.disks.of_checkpoints, DiskFault.FULL)


async def the_disk_of_the_run_is_full(run):
    await fails_for_a_while(run, run.disks.of_the_run, DiskFault.FULL)


async def a_quota_refuses_checkpoints(run):
    """Each probe finds room, and each checkpoint is refused."""
    await fails_for_a_while(run, run.disks.of_checkpoints, DiskFault.QUOTA)


async def all_die_while_the_disk_is_full(run):
    await run.until(4)
    run.disks.of_checkpoints.fail(DiskFault.FULL)
    await asyncio.sleep(10.0)
    run.trainer.kill()
    run.servers["server-1"].kill()
    await asyncio.sleep(30.0)
    run.disks.of_checkpoints.mend()


async def fails_for_a_while(run, disk, fault):
    await run.until(4)
    disk.fail(fault)
    await asyncio.sleep(60.0)
    disk.mend()


async def the_template_changes(run):
    """The weights are as they were, and whatever they write is worth nothing."""
    await run.until(FALLS_AT)
    run.break_template()


def once_at(step_of_fall, to):
    has_fallen = []

    def learns(policy, step):
        if step != step_of_fall or has_fallen:
            return policy
        has_fallen.append(step)
        return to

    return learns


BACK = (  # whether the gate's rejections begin the incident before the alarm does is a matter of which process is first
    f"health.{Cause.REWARD_COLLAPSE}",
    "checkpoint.condemning",
    "checkpoint.condemned",
    "trainer.restored",
    "incident.ended",
    "run.finished",
)
MENDED = ("canary.wrong", "incident.began", "incident.joined", "canary.sound", "incident.ended", "run.finished")
ONLY_A_COLLAPSE = ("checkpoint.condemned", "canary.wrong", f"health.{Cause.OUTSIDE_WEIGHTS}")
NOBODY_RESTARTED = ("checkpoint.condemned", "server.restarting", "trainer.restarting", "server.restarting_failed")

SCENARIOS = (
    Scenario(befalls=nothing, stands_for="a healthy run raises no alarm", is_harmless=True),
    Scenario(
        befalls=a_server_is_killed,
        stands_for="a lost server costs no prompt, and no trainer is restarted",
        shows=("incident.began", "server.restarting", "server.loaded", "server.ready", "incident.ended"),
        never=("checkpoint.condemned", "trainer.pausing", "trainer.restarting"),
        incidents=1,
    ),
    Scenario(befalls=all_servers_are_killed, stands_for="requests that nobody can answer are held, and not lost"),
    Scenario(befalls=all_servers_hang, stands_for="a hang has one incident, and one new server", incidents=2),
    Scenario(
        befalls=the_trainer_is_killed,
        stands_for="T1: restarted, the newest state that stands, resumed",
        shows=("incident.began", "trainer.restarting", "trainer.restoring", "trainer.restored", "server.loaded"),
        never=("checkpoint.condemned", "server.restarting"),
        incidents=1,
    ),
    Scenario(befalls=trainer_and_server_at_once, stands_for="D1: one that dies while the other recovers"),
    Scenario(
        befalls=the_monitor_is_killed,
        stands_for="a monitor that is away holds the gate shut, and is no incident",
        is_harmless=True,
    ),
    Scenario(befalls=the_coordinator_is_killed, stands_for="M1: its successor adopts what lives", is_harmless=True),
    Scenario(befalls=the_coordinator_is_killed_with_the_trainer, stands_for="what was under way is done by the next"),
    Scenario(
        befalls=the_coordinator_is_killed_while_a_server_starts,
        stands_for="Killed after it ordered a restart, which the server's actor carries out on its own.",
        incidents=1,
    ),
    Scenario(
        befalls=trainer_and_monitor_at_once,
        stands_for="a trainer that died while all was well is loaded when the monitor answers",
        incidents=1,
    ),
    Scenario(
        befalls=a_start_of_each_server_fails,
        stands_for="a start that fails is one more attempt of the same incident",
        shows=("incident.began", "server.restarting_failed", "server.restarted", "incident.ended"),
        incidents=2,
    ),
    Scenario(befalls=a_server_starts_no_more, stands_for="one that is beyond repair is given up, and the run goes on"),
    Scenario(
        befalls=no_server_starts_any_more,
        stands_for="a fault that no repair removes ends the run, with its reason",
        ends=TerminalStatus.ERRORED,
        shows=("incident.began", "run.errored"),
    ),
    Scenario(
        befalls=the_trainer_ends_again_and_again,
        stands_for="restarts that bring no step further have an end",
        ends=TerminalStatus.ERRORED,
        shows=("incident.began", "run.errored"),
    ),
    Scenario(
        befalls=a_person_ends_the_run,
        stands_for="who is asked to end the run saves it, and is not asked twice",
        ends=TerminalStatus.ABORTED,
        is_harmless=True,
    ),
    Scenario(
        befalls=a_person_ends_the_run_and_the_coordinator_is_killed,
        stands_for="an end that was decided is carried out by whoever takes over, with its word and its reason",
        ends=TerminalStatus.ABORTED,
        is_harmless=True,
    ),
    Scenario(
        befalls=a_server_says_that_it_has_the_weights,
        stands_for="a label vouches for no weights: the batch is rejected by their log-probs, and they are sent again",
        shows=("batch.rejected", "incident.began", "incident.ended"),
    ),
    Scenario(befalls=the_judge_breaks, stands_for="S1: nothing is trained on false rewards", shows=MENDED),
    Scenario(
        befalls=the_monitor_is_killed_while_the_judge_is_broken,
        stands_for="The trainer was resumed, and the incident told as over, each time the monitor was killed during "
        "such a pause.",
        shows=MENDED,
        incidents=1,
    ),
    Scenario(
        befalls=both_supervisors_are_killed_while_the_judge_is_broken,
        stands_for="who takes over while the monitor is away calls no incident over",
        shows=MENDED,
        incidents=1,
    ),
    Scenario(
        befalls=the_judge_breaks_late_in_a_run,
        stands_for="S2: a broken function is told from a collapse, so nothing is thrown away",
        epochs=14,
        shows=MENDED,
    ),
    Scenario(
        befalls=the_judge_stays_broken,
        stands_for="S1: the run ends with its reason, and a person resumes it from the newest state",
        ends=TerminalStatus.ERRORED,
        shows=("canary.wrong", "incident.began", "run.errored"),
    ),
    Scenario(
        befalls=the_policy_collapses,
        stands_for="S4: paused, what holds the damage condemned, restored to before it, resumed",
        epochs=LONG,
        incidents=1,
        shows=BACK,
        never=ONLY_A_COLLAPSE[1:],
    ),
    Scenario(
        befalls=the_policy_collapses_behind_a_narrow_gate,
        stands_for="the batches that the gate drops first belong to the collapse that is found later: one incident",
        epochs=LONG,
        incidents=1,
        shows=("batch.rejected", "incident.began", "batch.rejected", *BACK),
        never=ONLY_A_COLLAPSE[1:],
    ),
    Scenario(
        befalls=the_policy_collapses_and_a_restore_fails,
        stands_for="a restore that fails is tried once more, and counts as no second collapse",
        epochs=LONG,
        shows=BACK,
        never=ONLY_A_COLLAPSE[1:],
    ),
    Scenario(
        befalls=the_policy_half_collapses,
        stands_for="rewards that fall, and are not 0, are a collapse too",
        epochs=LONG,
        incidents=1,
        shows=BACK,
        never=ONLY_A_COLLAPSE[1:],
    ),
    Scenario(
        befalls=the_policy_rots,
        stands_for="a slope is dated to where it began: no checkpoint from within passes for good",
        epochs=LONG,
        incidents=1,
        shows=BACK,
        never=ONLY_A_COLLAPSE[1:],
    ),
    Scenario(
        befalls=the_policy_collapses_at_the_same_place,
        stands_for="restores that do not help have an end, each further back than the one before",
        epochs=LONG,
        ends=TerminalStatus.ERRORED,
        shows=("checkpoint.condemned", "trainer.restored", "trainer.restored", "run.errored"),
        never=ONLY_A_COLLAPSE[1:],
    ),
    Scenario(
        befalls=the_policy_writes_one_bad_text,
        stands_for="a policy that writes one text and earns less has collapsed, although its rewards vary no more",
        epochs=LONG,
        incidents=1,
        shows=BACK,
        never=ONLY_A_COLLAPSE[1:],
    ),
    Scenario(
        befalls=the_policy_writes_one_text_that_earns_as_before,
        stands_for="P11: of a policy that writes one text and earns as before nothing is claimed",
        epochs=LONG,
        is_harmless=True,
    ),
    Scenario(
        befalls=the_disk_of_checkpoints_is_full,
        stands_for="a checkpoint that is refused pauses the run until there is room, and is then saved first",
        shows=("incident.began", "trainer.paused", "trainer.resumed", "incident.ended"),
        never=NOBODY_RESTARTED,
    ),
    Scenario(
        befalls=the_disk_of_the_run_is_full,
        stands_for="no step is taken beyond the one whose line is refused, and the line is written when there is room",
        never=NOBODY_RESTARTED,
    ),
    Scenario(
        befalls=a_quota_refuses_checkpoints,
        stands_for="what no probe shows is waited for, and tried again",
        never=NOBODY_RESTARTED,
    ),
    Scenario(
        befalls=all_die_while_the_disk_is_full,
        stands_for="nothing is restarted that would meet the same disk; when there is room all of it is",
        shows=("incident.began", "trainer.restarted", "run.finished"),
    ),
    Scenario(
        befalls=the_template_changes,
        stands_for="P12: weights that earn less than when they were saved are not at fault, and all is put back",
        epochs=LONG,
        ends=TerminalStatus.ERRORED,
        shows=(f"health.{Cause.OUTSIDE_WEIGHTS}", "checkpoint.reinstated", "run.errored"),
        never=("canary.wrong",),
    ),
)
