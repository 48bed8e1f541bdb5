"""A supervised run whose fleet a test changes: `python -m tests.fleet_run …`, as tests/supervised_run.py.

A line in `{fileroot}/orders` is an operator's order: `add`, or `remove server-0`. A thread of the driver's process,
which is on the run's cluster already, hands it to the Coordinator. GRPO_TEST_RECOVER_URL is the run's `recover.url`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import ray

from actors.coordinator_actor import COORDINATOR
from launcher import driver
from tests.supervised_run import STAND_IN, SupervisedRun, run_config

ORDERS = "orders"
URL = "GRPO_TEST_RECOVER_URL"


class FleetRun(SupervisedRun):
    def __init__(self, fileroot: Path, **options) -> None:
        super().__init__(fileroot, **options)
        self._orders = fileroot / ORDERS
        self._command[2] = "tests.fleet_run"

    def order(self, line: str) -> None:
        with self._orders.open("a") as file:
            file.write(f"{line}\n")


def obey(orders: Path) -> None:
    done = 0
    while True:
        time.sleep(0.1)
        lines = orders.read_text().split("\n")[:-1] if orders.exists() else []
        for line in lines[done:]:
            coordinator = ray.get_actor(COORDINATOR)
            what, _, name = line.partition(" ")
            if what == "add":
                ray.get(coordinator.add_server.remote("by order"))
            else:
                ray.get(coordinator.remove_server.remote(name, "by order"))
        done = len(lines)


if __name__ == "__main__":
    config = run_config(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    config.recover.url = os.environ.get(URL)
    threading.Thread(target=obey, args=(Path(sys.argv[1]) / ORDERS,), daemon=True).start()
    sys.exit(driver.run(config, server_entry=STAND_IN))
