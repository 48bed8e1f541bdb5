"""One local Ray cluster for all tests here that need not kill it."""

import shutil
import tempfile
from pathlib import Path

import pytest
import ray

from tests.programs.server_driver import start_ray


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    start_ray(tmp_path_factory.mktemp("cluster"), folder)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
