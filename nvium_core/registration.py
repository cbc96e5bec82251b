"""Imports one module as soon as others have been imported, and not before. Knows nothing of models."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register_when_imported(awaited: Sequence[str], registers: str) -> None:
    """Import `registers` once any of these is imported, and those of them that import it; at once if one is already."""
    if any(name in sys.modules for name in awaited):
        import_module(registers)
    else:
        sys.meta_path.insert(0, _Watcher(awaited, registers))


class _Watcher(MetaPathFinder):
    """Finds modules as the others would, with a loader that goes on to `registers`."""

    def __init__(self, awaited: Sequence[str], registers: str) -> None:
        self._awaited = set(awaited)
        self._registers = registers
        self._depth = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._awaited:
            return None
        self._awaited.remove(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Continued(spec.loader, self)
        return spec

    def execute(self, loader: Loader, module: ModuleType) -> None:
        """Register after the outermost of the modules: those that it imports are not usable before it is done."""
        self._depth += 1
        try:
            loader.exec_module(module)
        finally:
            self._depth -= 1
        if self._depth == 0:
            import_module(self._registers)


class _Continued(Loader):
    def __init__(self, loader: Loader, watcher: _Watcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """The module's own loader is put back before it runs, so that nothing else sees this one."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._watcher.execute(self._loader, module)
