"""What numbers that are not finite show: a batch to drop, a reward function to wait for, or weights to go back from.

    rewards ─► advantages ─► loss ─► gradient ─► optimizer ─► weights

Where advantages are not finite the rewards alone made them so, whatever the weights. Weights are looked at after each
optimizer step, before a server, a checkpoint or the ledger has them: a server with such weights answers nothing, and so
no batch would ever come that shows them.
"""

from __future__ import annotations

from actors.model.update_stats import UpdateStats
from launcher.base.errors import RewardError, TrainerError
from launcher.base.messages import Cause
from launcher.policy.admission import Admission

IN_A_ROW = 2
"""One such batch is dropped. At a second one in a row weights are suspected, or else the rewards that made it so."""
WEIGHTS = "the weights after the optimizer's step"


def judge(stats: UpdateStats, *, step: int, in_a_row: int, weights_are_finite: bool) -> Admission:
    """Why the batch is dropped. `in_a_row`: such batches, this one too.

    Raises TrainerError where its weights are at fault or suspected, RewardError where the rewards are for good.
    """
    reason = "; ".join(stats.problems)
    is_lasting = in_a_row >= IN_A_ROW
    if not weights_are_finite or (is_lasting and not stats.is_of_rewards):
        raise error(step, reason)
    if is_lasting:
        raise RewardError(f"step {step}: {reason}", "reward.fn is to answer numbers that float32 holds")
    cause = Cause.VERIFIER_BROKEN if stats.is_of_rewards else Cause.NONFINITE
    return Admission(admitted=False, reason=reason, cause=cause)


def error(step: int, reason: str) -> TrainerError:
    return TrainerError(
        f"step {step}: numbers that are not finite: {reason}",
        "actor.optimizer.lr, actor.optimizer.gradient_clipping and actor.dtype are the usual causes; "
        "recover.mode=auto resumes from the last checkpoint",
    )
