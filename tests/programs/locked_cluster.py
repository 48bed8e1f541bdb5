"""A Ray cluster as a run starts one, with the dashboard that it leaves out: `python -m tests.programs.locked_cluster
FOLDER`.

Prints one line of JSON with where it is, and ends with its standard input. The token lies in FOLDER.
"""

import functools
import json
import logging
import os
import sys
from pathlib import Path

import ray

from actors.cluster.ray_cluster import RAY_ENVIRONMENT, lock_with_a_token, ray_folder, start_patiently
from launcher.run_files.run_keys import make_ray_token

log = logging.getLogger("locked cluster")


def main() -> None:
    os.environ.update(RAY_ENVIRONMENT)
    lock_with_a_token(make_ray_token(Path(sys.argv[1])))
    start = functools.partial(
        ray.init,
        address="local",
        num_cpus=1,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=str(ray_folder()),
    )
    started = start_patiently(start, log.warning)
    told = {"gcs": started.address_info["gcs_address"], "dashboard": started.dashboard_url}
    print(json.dumps(told | {"session": started.address_info["session_dir"]}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
