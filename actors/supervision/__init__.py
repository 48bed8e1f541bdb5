"""Keeps a run alive: the Coordinator observes servers, trainer and monitor, asks launcher/policy for a plan, and acts.

It may import every other room of actors, and nothing imports it but the driver. Begin with coordinator.py (the loop,
and how it observes and acts), then cluster_observer.py and action_executor.py (both on a real run), and run_history.py
(writes down what was decided). server_handle.py, trainer_handle.py and monitor_handle.py hold one actor each.
actors/cluster/actor_calls.py asks trainer and monitor periodically, and the monitor tells of the servers. run_actors.py
creates them all, in the driver.
"""
