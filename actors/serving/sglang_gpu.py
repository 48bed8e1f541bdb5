"""Runs SGLang on a GPU as its own entry does: `python -m actors.serving.sglang_gpu <SGLang's own arguments>`.

Added is the middleware that checks keys. It has not been run on a GPU.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Serve until asked to stop. `sys.argv` holds SGLang's arguments."""
    from actors.serving import auth_middleware

    auth_middleware.keys_or_exit()
    import sglang.srt.entrypoints.http_server as http
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    auth_middleware.refuse_bypasses(server_args)
    auth_middleware.protect(http.app)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
