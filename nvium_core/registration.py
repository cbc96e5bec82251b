"""Imports one module as soon as another has been imported, and not before. Knows nothing of models."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register_when_imported(awaited: str, registers: str) -> None:
    """Import `registers` once `awaited` is imported; at once if it is already."""
    if awaited in sys.modules:
        import_module(registers)
    else:
        sys.meta_path.insert(0, _Watcher(awaited, registers))


class _Watcher(MetaPathFinder):
    """Finds one module as the others would, with a loader that goes on to the second."""

    def __init__(self, awaited: str, registers: str) -> None:
        self._awaited = awaited
        self._registers = registers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._awaited:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Continued(spec.loader, self._registers)
        return spec


class _Continued(Loader):
    def __init__(self, loader: Loader, registers: str) -> None:
        self._loader = loader
        self._registers = registers

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """The module's own loader is put back before it runs, so that nothing else sees this one."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        import_module(self._registers)
