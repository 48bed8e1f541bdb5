"""A web server that takes alerts."""

import json
import queue
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.machine import scaled

deadline_s = partial(scaled, 30.0)


@pytest.fixture
def webhook():
    """A real HTTP server: its url, what it got, and the statuses it answers with, the last one for ever."""
    got, statuses = queue.Queue(), [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses[0] if len(statuses) == 1 else statuses.pop(0))
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret", got, statuses
    server.shutdown()
    server.server_close()
