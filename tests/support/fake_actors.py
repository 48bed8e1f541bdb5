"""Actors as their callers see them: `.remote(…)` gives something to await."""

import asyncio


class Method:
    """As Ray's."""

    def __init__(self, call):
        self.remote = call


class Call:
    """As Ray's: an answer that may be awaited, and that nobody has to await as a coroutine."""

    def __init__(self, begin):
        self._begin = begin

    def __await__(self):
        return self._begin().__await__()


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

        return lambda *args, **kwargs: Call(lambda: call(*args, **kwargs))


async def never():
    await asyncio.get_running_loop().create_future()
