"""Each measuring command of the laboratory at its smallest, and the points that the figures are made of."""

SMALLEST = {
    "disturb server_killed": (("--times", "1"), ("other_tokens_s", "alone_tokens_s")),
    "disturb server_stopped": (("--times", "1"), ("stopped_condemned_s", "stopped_alarms")),
    "disturb trainer_killed": (("--times", "1"), ("parked_beyond_a_step_s", "cold_beyond_a_step_s")),
    "fault_bench": (("--cells", "noop", "--minutes", "10"), ("alarms", "usual_step_s")),
    "overhead": (("--pairs", "1", "--block", "2", "--warm-up", "1"), ("overhead", "on_step_s", "off_step_s")),
}
