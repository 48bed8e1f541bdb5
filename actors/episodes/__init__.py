"""Episodes: code of the user's that asks the model several times, and a record of every token of each answer.

May import `actors.reward`, `actors.data`, `actors.serving` and what lies below them. Begin with `transcript` (what is
recorded), then `episode_runner` (who runs it). The user's code itself is in processes of
`actors/reward/user_process.py`.
"""
