"""SGLang servers: their command, their processes through all incarnations, their HTTP client and their keys.

May import `actors.cluster`, `actors.processes` and the launcher's rooms below `actors`. Begin with `sglang_server` (the
actor of one server), then `server_incarnation` (one process), `server_watch` (is it alive?), `server_report` (what the
HealthMonitor hears of it) and `sglang_client` (requests).
"""
