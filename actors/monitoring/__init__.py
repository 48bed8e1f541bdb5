"""What is healthy: the HealthMonitor, its polls of servers, the rewards and the memory, and the alerts for people.

It observes, and judges by the rules of launcher/policy; it changes nothing, the Coordinator (actors/supervision) does.
It may import every room of actors below supervision. Begin with `health_monitor.py`. A server
is watched and judged by its own actor (actors/serving/server_watch.py).
"""
