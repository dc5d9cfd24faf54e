"""Scorers and encoders by name: built in, registered by the user, or from installed packages.

A package registers its implementations by entry points. They are read if a name is not built in:

    [project.entry-points."captioner.scorers"]
    cosine = "my_package:CosineScorer"

A model folder records the package of each implementation. So if the package is missing, an error
can name it. Loading a model folder never imports a package that only the folder names.
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
    """Mapping from names to implementations, which are imported on access."""

    def __init__(self, kind: str, builtin: Mapping[str, T] | None = None) -> None:
        """Create a registry for a kind: ``scorer`` or ``encoder``. Built-in names cannot change."""
        self.kind = kind
        self._builtin: Mapping[str, T] = builtin or {}
        self._registered: dict[str, T] = {}

    def register(self, name: str, implementation: T) -> None:
        """Add an implementation under a name.

        The same definition may be registered twice, because notebook cells are run twice.

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
        return any(name == known for known in self)

    def __iter__(self) -> Iterator[str]:
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
                f"({type(error).__name__}: {first_line(error)}); update its package"
            ) from error
        return implementation

    def provider(self, name: str) -> dict[str, str] | None:
        """Return the origin of an implementation for a model folder, or None if it is built in.

        The keys are ``kind``, ``name`` and ``module``, and for installed packages also ``package``
        and ``version``.
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
        return metadata.entry_points(group=f"captioner.{self.kind}s")


def _definition(implementation: Any) -> tuple[str, str]:
    """Return the module and the qualified name of a class or function."""
    owner = implementation if hasattr(implementation, "__qualname__") else type(implementation)
    return str(owner.__module__), str(owner.__qualname__)


def what_is_missing(record: Mapping[str, Any]) -> str:
    """Describe a missing implementation and its remedy, from a record of ``Registry.provider``.

    The record comes from a model folder, so only valid names from it are repeated.
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
