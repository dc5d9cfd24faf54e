"""Scorers and encoders by name: built in, registered by the user, or from installed packages.

An installed package offers implementations with entry points in its pyproject.toml:

    [project.entry-points."captioner.scorers"]
    cosine = "my_package:CosineScorer"

A model folder records the package that each of its implementations comes from. If the package is
missing, the error can therefore name it. For safety, loading a model folder imports a package only
if the package itself has such an entry point, not because the folder names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, Generic, TypeVar

from captioner.errors import ConfigError
from captioner.messages import first_line

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Mapping from names to implementations, such as classes of scorers.

    A package is imported only when its implementation is accessed.
    """

    def __init__(self, kind: str, builtin: Mapping[str, T] | None = None) -> None:
        """Create a registry.

        Args:
            kind: ``scorer`` or ``encoder``. The group of the entry points is ``captioner.scorers``
                or ``captioner.encoders``.
            builtin: Implementations that are part of captioner. Their names cannot be registered.
        """
        self.kind = kind
        self._builtin: Mapping[str, T] = builtin or {}
        self._registered: dict[str, T] = {}

    def register(self, name: str, implementation: T) -> None:
        """Add an implementation under a name, in this process only.

        A class or function of the same module and name replaces the registered one, because
        notebook cells are often run again.

        Raises:
            ConfigError: The name is invalid or already taken.
        """
        if not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name)):
            raise ConfigError(
                f"{self.kind} name {name!r} is invalid; use letters, digits, '_', '-' and '.'"
            )
        held = self._registered.get(name, implementation)
        if name in self._builtin or _definition(held) != _definition(implementation):
            raise ConfigError(
                f"{self.kind} {name!r} is built in or registered already; choose another name"
            )
        self._registered[name] = implementation

    def __contains__(self, name: object) -> bool:
        """Return whether a name is known, without importing its package."""
        return any(name == known for known in self)

    def __iter__(self) -> Iterator[str]:
        """Yield all names: built in, then registered, then installed. No package is imported."""
        installed = sorted(self._points().names)
        return iter(dict.fromkeys([*self._builtin, *self._registered, *installed]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> T:
        """Return the implementation with this name, and import its package if necessary."""
        for known in (self._builtin, self._registered):
            if name in known:
                return known[name]
        point = self._points()[name]
        try:
            implementation: T = point.load()
        except Exception as error:  # the package's own code runs here
            raise ConfigError(
                f"{self.kind} {name!r} cannot be imported from {point.value} "
                f"({type(error).__name__}: {first_line(error)}); update or reinstall the Python "
                f"package that contains {point.value}"
            ) from error
        return implementation

    def provider(self, name: str) -> dict[str, str] | None:
        """Describe the origin of an implementation, so that a model folder can record it.

        Returns:
            A record with the keys ``kind``, ``name`` and ``module``. If the module belongs to an
            installed package, it also has ``package`` and ``version``. None if the name is built in
            or unknown.
        """
        if name in self._builtin or name not in self:
            return None
        if name in self._registered:
            module, _ = _definition(self._registered[name])
            packages = metadata.packages_distributions().get(module.partition(".")[0], [])
        else:
            point = self._points()[name]
            module, packages = point.module, [point.dist.name] if point.dist else []
        found = {"kind": self.kind, "name": name, "module": module}
        if packages:
            found |= {"package": packages[0], "version": metadata.version(packages[0])}
        return found

    def _points(self) -> metadata.EntryPoints:
        """Return the entry points of this kind in all installed packages."""
        return metadata.entry_points(group=f"captioner.{self.kind}s")


def _definition(implementation: Any) -> tuple[str, str]:
    """Return the module and the qualified name of a class or function, or of an object's class."""
    owner = implementation if hasattr(implementation, "__qualname__") else type(implementation)
    return str(owner.__module__), str(owner.__qualname__)


def what_is_missing(record: Mapping[str, Any]) -> str:
    """Describe a missing implementation and its remedy, as the end of an error message.

    Args:
        record: Origin of the implementation, from ``Registry.provider``. It was read from a model
            folder, which may come from a stranger. Anything in it that is not a plain name is
            therefore left out of the message.
    """
    kind, name, module, package = (
        text if isinstance(text, str) and re.fullmatch(r"\w[\w.-]{0,99}", text, re.ASCII) else ""
        for text in map(record.get, ("kind", "name", "module", "package"))
    )
    if package and not any(package in held for held in metadata.packages_distributions().values()):
        return f"the {kind} {name} of the package {package}; run: pip install {package}"
    if not module or module == "__main__":
        call = f"call captioner.register_{kind}({name!r}, ...) first, or install it as a package"
        return f"the {kind} {name} of a script; {call} (docs/python.md)"
    return (
        f"the {kind} {name}, which {module} registers; in Python import {module} first, for "
        "commands install it as a package (docs/python.md)"
    )
