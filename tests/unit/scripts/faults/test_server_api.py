"""Faults through a server's own API, on a stand-in that dies of what SGLang dies of."""

import threading
import time

from launcher.run_files.run_keys import ServerKeys
from scripts.faults import server_api
from tests.programs import stand_in_server
from tests.support.episodes.chat_templates import MODEL

KEYS = ServerKeys(api="a", admin="a")
LONG = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 500, "min_new_tokens": 500, "temperature": 1.0}}


def test_a_server_that_is_answering_outlives_the_stale_weights():
    words = ("--weight-version", "3", "--model-path", str(MODEL), "--seconds-per-token", "0.1")
    with stand_in_server.running(*words) as url:
        answering = threading.Thread(target=lambda: server_api.ask(url, "/generate", KEYS, LONG))
        answering.start()
        while "/generate" not in str(server_api.ask(url, "/stand_in/state", KEYS)["asked"]):
            time.sleep(0.01)
        server_api.load_weights(url, str(MODEL), KEYS, version="2")
        assert server_api.weight_version(url, KEYS) == "2"
        answering.join()
