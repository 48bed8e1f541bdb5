"""An inert `sgl_kernel` for servers that run on the CPU.

SGLang imports names from its compiled extension `sgl_kernel` at module level, also on the pure-torch paths that a
CPU server takes, and that extension can't be loaded without CUDA's driver library. This finder answers
`import sgl_kernel` and any submodule of it with a module whose every attribute exists and raises `KernelMissing`
when called: the imports succeed, and a path that does need a kernel reports which one, instead of computing something
wrong. `torch.ops.sgl_kernel` is torch's own registry and is left alone; nothing is registered there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "sgl_kernel"


class KernelMissing(RuntimeError):
    """A compiled kernel was called in a server that runs without them."""


def _attribute(owner: object, attribute: str) -> _MissingKernel:
    if attribute.startswith("__"):  # `copy`, `pickle` and `inspect` ask for protocols, not all of which exist
        raise AttributeError(attribute)
    return _MissingKernel(f"{owner.__name__}.{attribute}")  # type: ignore[attr-defined]


class _MissingKernel:
    """Takes the place of a kernel: can be imported, passed about and reached into, but not called."""

    __getattr__ = _attribute

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: object, **__: object) -> None:
        raise KernelMissing(
            f"{self.__name__} is a compiled kernel, and this SGLang server runs on the CPU without them; "
            "use a model and options that torch alone can serve (docs/recipes.md, with torch_native attention)"
        )


class _StandInModule(ModuleType):
    __getattr__ = _attribute


class _StandInFinder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == PACKAGE or fullname.startswith(f"{PACKAGE}."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: attributes are answered as they are asked for."""


def install() -> None:
    """Answer `sgl_kernel` in this process from now on; a second call changes nothing.

    Raises ImportError where the real extension is loaded already: half of each would be worse than either.
    """
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None and not isinstance(loaded, _StandInModule):
        raise ImportError(f"{PACKAGE} is already loaded from {loaded.__file__}; the stand-in must come first")
    if not any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandInFinder())
