"""Rollouts: which server answers which request, completions of each prompt with retries, and their scores.

May import `actors.episodes`, `actors.data`, `actors.reward`, `actors.serving` and what lies below them. Begin with
`rollout_engine` (one batch), then `server_pool` (who may answer).
"""
