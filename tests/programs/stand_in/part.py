"""A stand-in for a server over several nodes: all parts meet at `--dist-init-addr` before the first one serves.

As SGLang's: the first node's part listens there and waits for the others, which wait for it; further parts then serve
nobody, and stay for as long as they are let. `python -m tests.programs.stand_in.part [SGLang arguments]`.
"""

import argparse
import socket
import sys
import threading
import time

from tests.programs import stand_in_server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--dist-init-addr", required=True)
    given, _ = parser.parse_known_args()
    host, _, port = given.dist_init_addr.rpartition(":")
    if given.node_rank > 0:
        print(f"part {given.node_rank} of {given.nnodes}, {' '.join(sys.argv[1:])}", flush=True)
        meet((host, int(port)))
        threading.Event().wait()
    with socket.create_server((host, int(port))) as listener:
        for _ in range(given.nnodes - 1):
            listener.accept()
    stand_in_server.main()


def meet(address: tuple[str, int]) -> None:
    while True:
        try:
            socket.create_connection(address, timeout=5).close()
        except OSError:  # the first part isn't there yet
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    main()
