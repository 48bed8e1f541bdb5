"""Actors as their callers see them: `.remote(…)` gives something to await."""

import asyncio


class Method:
    """As Ray's."""

    def __init__(self, call):
        self.remote = call


class FakeActor:
    """Each keyword names a method; its value is what the method does with its arguments (a value: what it answers)."""

    def __init__(self, **methods):
        self.calls = []
        for name, does in methods.items():
            setattr(self, name, Method(self._noted(name, does)))

    def _noted(self, name, does):
        async def call(*args, **kwargs):
            self.calls.append(name)
            answer = does(*args, **kwargs) if callable(does) else does
            return await answer if asyncio.iscoroutine(answer) else answer

        # As Ray's, a call is made whether or not anybody waits for its answer.
        return lambda *args, **kwargs: asyncio.ensure_future(call(*args, **kwargs))


async def never():
    await asyncio.get_running_loop().create_future()
