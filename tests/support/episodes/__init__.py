"""Agents and chat templates for the tests of episodes."""
