"""An S3 of our own for tests: `python -m tests.programs.object_store BUCKET` serves moto's emulator until it is ended.

`running(bucket)` starts one as a process, and gives the environment in which s3fs finds it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

ACCESS = "emulated-access"
SECRET = "emulated-secret-of-nobody"


@contextlib.contextmanager
def running(bucket: str = "bucket") -> Iterator[dict[str, str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.programs.object_store", bucket], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = next((line.strip() for line in process.stdout if line.startswith("http://")), "")  # it says more
        try:
            assert url, "the emulator did not start"
            yield environment(url)
        finally:
            process.kill()


def environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def main() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    os.environ.update(environment(url))
    import boto3

    boto3.client("s3").create_bucket(Bucket=sys.argv[1])
    print(url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
