"""What a process of a run is for: the role of each."""

import re

import psutil

from actors.processes.process_host import HOST


def role_of(process):
    """What a person would call it, by its title or its command; "" where it has ended since it was found."""
    try:
        words, title = process.cmdline(), process.name()
    except psutil.NoSuchProcess:
        return ""
    if title == HOST:
        return "host"
    text = " ".join(words)
    for name, sign in {
        "keeper": "launcher.cli.keeper",
        "driver": "tests.programs.supervised_run",
        "stand-in": "tests.programs.stand_in_server",
        "reward worker": "reward_worker",
        "gcs": "gcs_server",
        "raylet": "raylet/raylet",
    }.items():
        if sign in text.replace(" --raylet", ""):
            return name
    if match := re.match(r"ray::(\w+)", text):
        return match[1]
    match = re.search(r"(\w+)\.py\b", text)
    return match[1] if match else re.split(r"\W+", words[0] if words else title)[-1]
