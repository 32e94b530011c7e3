"""Which installed packages are other versions than those that this one was tested with (`pyproject.toml`)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata


def untested(package: str = "grpo_rl") -> Iterator[str]:
    """Yield name, version and tested range of each dependency of `package` that is another one; nothing if it is not installed itself."""
    from packaging.requirements import Requirement  # a dependency of transformers

    try:
        requirements = [Requirement(line) for line in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} (tested: {requirement.specifier})"
