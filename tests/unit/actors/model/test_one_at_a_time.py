"""A server is admitted while the trainer trains: log-probs are computed between two orders, never within one."""

import threading
from functools import partial

from tests.support.machine import scaled
from tests.support.tiny_models import make_groups, policy

deadline_s = partial(scaled, 60.0)


class NoticedLock:
    """A lock that says when somebody comes to it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.comes = threading.Event()

    def __enter__(self):
        self.comes.set()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_log_probs_that_are_asked_for_within_a_backward_pass_wait_for_its_end(folder, monkeypatch):
    model = policy(folder, temperature=1.0)
    expected = model.logprobs((1, 2), (3, 4))
    lock = NoticedLock()
    model._turn = lock
    running, ends, found = threading.Event(), [], []
    run, logprobs = model._objective.run, model._learner.logprobs

    def ask():
        found.append(model.logprobs((1, 2), (3, 4)))

    def slow(*which):
        if not ends:
            running.set()
            lock.comes.clear()
            asking = threading.Thread(target=ask, daemon=True)
            ends.append(asking)
            asking.start()
            assert lock.comes.wait(deadline_s())
        done = run(*which)
        running.clear()
        return done

    def noticed(*asked):
        lock.comes.set()
        assert not running.is_set(), "beside a backward pass"
        return logprobs(*asked)

    monkeypatch.setattr(model._objective, "run", slow)
    monkeypatch.setattr(model._learner, "logprobs", noticed)
    stats = model.compute_gradients(make_groups())
    (asking,) = ends
    asking.join(deadline_s())
    assert found == [expected]
    assert stats.finite
    model.commit()
