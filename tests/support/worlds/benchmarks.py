"""Each benchmark's smallest run, and which of them fault_bench calls."""

SMALLEST = {
    "supervision": (("--pairs", "1", "--block", "2", "--warm-up", "1"), ("overhead", "on_step_s", "off_step_s")),
    "failover": (("--kills", "1"), ("other_tokens_s", "alone_tokens_s")),
    "hangs": (("--hangs", "1"), ("condemned_s",)),
    # a kill comes within 3 s of its turn: with fewer steps the run would be over, and no step would follow the kill
    "trainer_kills": (("--kills", "1", "--runs", "1", "--gap", "10"), ("lost", "parked_beyond_a_step_s")),
}
"""Options of `python -m scripts.lab.benchmark`, and the points that the figures are made of."""


BY_FAULT_BENCH = "restores"
"""Has no run, so that `scripts.lab.fault_bench` itself is run with it."""
