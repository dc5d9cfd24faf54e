"""``--engine ray`` and its options, for the commands that can use a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from captioner.cli.main import flag
from captioner.cli.parser import Parser
from captioner.errors import ConfigError
from captioner.extras import require_extra

if TYPE_CHECKING:
    from captioner.bulk.actors import Workers

_OPTIONS: dict[str, tuple[Any, str]] = {
    "workers": (int, "number of processes (default: as many as fit)"),
    "worker_cpus": (float, "CPUs per worker (default: 1)"),
    "worker_gpus": (float, "GPUs per worker; 0.5: two workers share one (default: 0)"),
    "ray_address": (
        str,
        "cluster to join: auto, or HOST:PORT (default: RAY_ADDRESS, or this machine)",
    ),
}
"""Type and help of the options that both commands have."""


def add_ray_options(parser: Parser, description: str, own: dict[str, tuple[Any, str]]) -> None:
    """Add ``--engine`` and the options of the engine ray.

    Args:
        parser: A command's.
        description: What the engine does, for the help.
        own: Type and help of further options for this engine only.
    """
    group = parser.add_argument_group("millions of photos")
    group.add_argument("--engine", choices=["plain", "ray"], default="plain", help=description)
    for name, (kind, text) in (own | _OPTIONS).items():
        group.add_argument(flag(name), type=kind | None, help=text)


def check_ray_options(options: Any, own: dict[str, tuple[Any, str]]) -> None:
    """Check the options of the chosen engine.

    Args:
        options: The command's.
        own: As for `add_ray_options`.

    Raises:
        ConfigError: Options of the engine ray were given to the other, a number is not allowed, or
            Ray is not installed.
    """
    if options["engine"] == "plain":
        for name in own | _OPTIONS:
            if options[name] is not None:
                raise ConfigError(
                    f"{flag(name)} is for --engine ray; add it, or leave this option out"
                )
        return
    for name in ("workers", "part_photos"):
        if options[name] is not None and options[name] < 1:
            raise ConfigError(f"{flag(name)} is {options[name]}; give 1 or more")
    for name in ("worker_cpus", "worker_gpus"):
        if options[name] is not None and not 0 <= options[name] < float("inf"):
            raise ConfigError(f"{flag(name)} is {options[name]}; give 0 or more")
    if options["worker_cpus"] == 0 and not options["worker_gpus"]:
        raise ConfigError("--worker-cpus is 0; give 1 or more, or --worker-gpus")
    require_extra("ray", "--engine ray")


def chosen_workers(options: Any) -> Workers:
    """The workers that the options describe."""
    from captioner.bulk.actors import Workers

    cpus = options["worker_cpus"]
    return Workers(options["workers"], 1 if cpus is None else cpus, options["worker_gpus"] or 0)
