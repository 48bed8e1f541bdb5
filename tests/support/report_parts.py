"""A data for the report's tests, told line by line, and a page as a browser reads it."""

import json
from html.parser import HTMLParser

from launcher.reporting.run_facts import facts_of
from launcher.reporting.run_reader import RunData

T0 = 1_790_000_000.0


def event(data, name, now, /, **facts):
    data.take_event({"time": T0 + now, "monotonic": now, "event": name, "attempt": 1} | facts)


def step(data, number, at, *, reward=0.5, took=10.0, attempt=1):
    data.take_step(
        {"global_step": number, "attempt": attempt, "time": T0 + at, "rollout/reward": reward}
        | {"timeperf/step_s": took, "rollout/tokens_per_s": 100.0}
    )
    ledger = {"global_step": number, "prompt_ids": [f"p{number}"], "weight_versions": [number]}
    data.take_ledger(ledger | {"rollouts_failed": 1, "rollouts_retried": 2})


def facts(data, **more):
    return facts_of(data, experiment_name="exp", trial_name="t0", **more)


def started(steps=(), *, every_s=10):
    """What the files hold of a run that has begun, and done these steps."""
    data = RunData()
    event(data, "run.started", 0, reason="fresh")
    event(data, "trainer.started", 5, prompts=1000, total_steps=100)
    for number in steps:
        step(data, number, 20 + every_s * number)
    return data


def facts_in(page):
    """The JSON in a page, as its scripts read it."""
    return json.loads(page.decode().partition('id="facts">')[2].partition("</script>")[0])


def facts_of_page(paths):
    """Of a run's report.html."""
    return facts_in(paths.report.read_bytes())


class Elements(HTMLParser):
    """Every element and attribute that a browser would find."""

    def __init__(self, content):
        super().__init__()
        self.found = []
        self.attributes = []
        self.feed(content)

    def handle_starttag(self, name, attributes):
        self.found.append(name)
        self.attributes += attributes
