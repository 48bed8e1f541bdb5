"""One asyncio loop whose clock jumps to the next thing that is due, and threads that take turns with it.

The step loop of a trainer is plain code that blocks. Here it runs in a guest thread, and of the loop and its guests
only one runs at a time: a guest that waits for the loop hands over, and the loop waits for a guest that it has woken.
So the clock stands still while anybody works, and a run of minutes takes the time of its computations.
"""

import asyncio
import contextlib
import contextvars
import selectors
import threading
import time
from concurrent.futures import Future

REAL_S = 120.0
"""For a guest, in real time: one that neither ends nor waits for the loop is a defect of the simulation."""
OWNER = contextvars.ContextVar("owner", default=None)
"""Whose process a task belongs to: it ends with that."""


@contextlib.contextmanager
def belongs_to(owner):
    """Tasks that are begun inside belong to this process; None: they outlive whoever begins them."""
    token = OWNER.set(owner)
    try:
        yield
    finally:
        OWNER.reset(token)


class Killed(BaseException):
    """Ends a thread of a process that was killed; no code of the project may catch it."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now`: seconds. Work for a thread pool is done at once, on the loop."""

    def __init__(self):
        self.now = 1000.0
        self._turn = threading.Condition()
        self._running = 0
        self._thread = threading.get_ident()
        super().__init__(_Selector(self))
        self.set_task_factory(_owned)

    def time(self):
        return self.now

    def run_in_executor(self, executor, function, *arguments):
        done = self.create_future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - as an executor hands it over
            done.set_exception(error)
        return done

    def is_here(self):
        return threading.get_ident() == self._thread

    def guest_runs(self, change):
        with self._turn:
            self._running += change
            self._turn.notify_all()

    def wait_for_guests(self):
        with self._turn:
            if not self._turn.wait_for(lambda: self._running == 0, timeout=REAL_S):
                raise RuntimeError("a guest neither ends nor waits for the loop")

    def park(self):
        """The thread of a process that was killed: it does nothing any more, not even what `finally` says."""
        self.guest_runs(-1)
        threading.Event().wait()

    async def run_guest(self, function, *arguments):
        """What `function` returns, on a thread of its own."""
        ended = GuestFuture(self)
        owner = OWNER.get()

        def body():
            OWNER.set(owner)
            try:
                result = function(*arguments)
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - for whoever waits
                self.call_soon_threadsafe(ended.set_exception, error)
            else:
                self.call_soon_threadsafe(ended.set_result, result)
            finally:
                self.guest_runs(-1)

        self.guest_runs(+1)
        threading.Thread(target=body, daemon=True).start()
        self.wait_for_guests()
        return await asyncio.wrap_future(ended)


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        self._loop.wait_for_guests()
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is due")
        self._loop.now += timeout
        return ready


def _owned(loop, work, **options):
    task = asyncio.Task(work, loop=loop, **options)
    owner = OWNER.get()
    if owner is not None:
        owner.tasks.add(task)
        task.add_done_callback(owner.tasks.discard)
    return task


class GuestFuture(Future):
    """Whoever waits for it on a guest thread hands over to the loop."""

    def __init__(self, loop):
        super().__init__()
        self._loop = loop
        self._waits = 0
        self.add_done_callback(GuestFuture._wake)

    def result(self, timeout=None):
        if not self._loop.is_here():
            with self._condition:
                is_open = not self.done()
                if is_open:
                    self._waits += 1
            if is_open:
                self._loop.guest_runs(-1)
        return super().result(timeout)

    def _wake(self):
        with self._condition:
            waits = self._waits
            self._waits = 0
        if waits:
            self._loop.guest_runs(waits)
            if self._loop.is_here():
                self._loop.wait_for_guests()


class VirtualThread:
    """In place of a process's own loop on a thread (LoopThread). `owner`: the process; one that is dead never gets an
    answer."""

    def __init__(self, loop, owner):
        self._loop = loop
        self._owner = owner

    def submit(self, work):
        self._owner.reach_moment("a call")
        if self._owner.is_dead:
            work.close()
            if self._loop.is_here():
                return GuestFuture(self._loop)
            self._loop.park()
        future = GuestFuture(self._loop)
        context = contextvars.copy_context()
        context.run(OWNER.set, self._owner)
        self._loop.call_soon_threadsafe(self._begin, work, future, context)
        return future

    def _begin(self, work, future, context):
        if future.cancelled() or self._owner.is_dead:
            work.close()
            return
        task = context.run(asyncio.ensure_future, work, loop=self._loop)
        task.add_done_callback(lambda done: self._hand_over(done, future))
        future.add_done_callback(lambda done: done.cancelled() and self._loop.call_soon_threadsafe(task.cancel))

    def _hand_over(self, task, future):
        """Nobody of a process that was killed gets an answer any more."""
        if task.cancelled():
            if not self._owner.is_dead:
                future.cancel()
            return
        error = task.exception()
        if future.cancelled() or self._owner.is_dead:
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def call(self, work):
        return self.submit(work).result()

    def close(self):
        pass


class TurnLock:
    """A lock of guests that hands over while it waits. Reentrant."""

    def __init__(self, loop):
        self._loop = loop
        self._holder = None
        self._depth = 0
        self._freed = []

    def acquire(self, *, blocking=True):
        me = threading.get_ident()
        if not blocking and self._holder not in (None, me):
            return False
        while self._holder not in (None, me):
            freed = GuestFuture(self._loop)
            self._freed.append(freed)
            freed.result()
        self._holder = me
        self._depth += 1
        return True

    def release(self):
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
            freed = self._freed
            self._freed = []
            for one in freed:
                self._loop.call_soon_threadsafe(one.set_result, None)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


def use_virtual_time(monkeypatch, loop):
    """The clock of everything that asks for it by `time.monotonic`, and `time.sleep` of guests."""
    sleep = time.sleep

    def virtual_sleep(seconds):
        if loop.is_here() or OWNER.get() is None:
            return sleep(0 if loop.is_here() else seconds)
        return VirtualThread(loop, OWNER.get()).call(asyncio.sleep(seconds))

    monkeypatch.setattr(time, "monotonic", lambda: loop.now)
    monkeypatch.setattr(time, "sleep", virtual_sleep)
