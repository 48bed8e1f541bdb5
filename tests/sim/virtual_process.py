"""A process of the simulated run."""

from launcher.base.messages import Cause


class Process:
    """Ends all that belongs to it when it is killed."""

    def __init__(self, run, kind):
        self.run = run
        self.kind = kind
        self.tasks = set()
        self.is_dead = False

    def reach_moment(self, what):
        """At each of these it may be killed (SimulatedRun.death); whether it is dead."""
        is_mortal = not self.is_dead and self.run.truth.furthest >= self.run.mortal_from
        if is_mortal and self.run.death.comes((self.kind, what)):
            self.is_dead = True
            if self.kind == "trainer":  # of the others' deaths no incident is made
                self.run.truth.befell(Cause.TRAINER_CRASH)
            self.run.loop.call_soon_threadsafe(self.kill)
        return self.is_dead

    def has_ended(self):
        return self.is_dead

    def kill(self):
        self.is_dead = True
        for task in tuple(self.tasks):
            task.cancel()
