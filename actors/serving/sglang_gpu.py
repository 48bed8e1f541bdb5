"""Runs SGLang on a GPU as its own entry does: `python -m actors.serving.sglang_gpu <SGLang's own arguments>`.

Added are the lock that reports a death early (`exit_notifier.py`), in the scheduler and the detokenizer too, which
import this module when they are spawned, and the middleware that checks keys. It has not been run on a GPU.
"""

from __future__ import annotations

import os
import sys

from actors.processes.exit_notifier import hold_one

if __name__ in ("__main__", "__mp_main__"):
    hold_one()


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
