"""Imports one module once others have been imported, and not before. Knows nothing of models."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register_when_imported(awaited: Sequence[str], registers: str) -> None:
    """Import `registers` once any of these modules of one package is imported; at once if one already is.

    They import one another: nothing is registered while any module of their package is half imported.
    """
    if any(name in sys.modules for name in awaited):
        import_module(registers)
    else:
        sys.meta_path.insert(0, _Watcher(awaited, registers))


def is_being_imported(name: str) -> bool:
    """Whether some module of the package is still being imported."""
    package = name.partition(".")[0] + "."
    specs = [
        getattr(module, "__spec__", None) for name, module in list(sys.modules.items()) if name.startswith(package)
    ]
    return any(getattr(spec, "_initializing", False) for spec in specs)


class _Watcher(MetaPathFinder):
    """A meta path finder whose loader imports `registers` afterwards."""

    def __init__(self, awaited: Sequence[str], registers: str) -> None:
        self._awaited = awaited
        self._package = awaited[0].partition(".")[0] + "."
        self._registers = registers
        self._depth = 0
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._package) or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._finding.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Continued(spec.loader, self)
        return spec

    def execute(self, loader: Loader, module: ModuleType) -> None:
        self._depth += 1
        try:
            loader.exec_module(module)
        finally:
            self._depth -= 1
        is_awaited = any(name in sys.modules for name in self._awaited)
        if self._depth == 0 and is_awaited and self in sys.meta_path and not is_being_imported(self._registers):
            sys.meta_path.remove(self)
            import_module(self._registers)


class _Continued(Loader):
    def __init__(self, loader: Loader, watcher: _Watcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own loader before the module runs."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._watcher.execute(self._loader, module)
