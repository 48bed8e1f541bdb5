"""How far rollouts may run ahead of the trainer: pure arithmetic, so that a token's age is bounded by construction."""


def may_take(in_flight: int, *, batch: int, ahead: int) -> int:
    """Prompts that may be taken now. Each step trains on those that were taken first, `batch` of them: what is taken
    at version v, as one of the first (ahead + 1) batches, is trained on at version v + ahead at the latest."""
    return max(0, (ahead + 1) * batch - in_flight)


def trained_at(place: int, *, version: int, batch: int) -> int:
    """The version at which the prompt at this place among those in flight is trained on."""
    return version + place // batch
