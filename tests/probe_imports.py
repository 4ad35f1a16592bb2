"""Run inside a bare environment: import every module of a package and print, as JSON, which distributions
that loaded, which the package declares, and which are installed.

python -I probe_imports.py MODULE DISTRIBUTION [OPTIONAL ...]

OPTIONAL: packages inside MODULE that need an extra and are left out.
"""

import importlib
import importlib.metadata as metadata
import json
import pkgutil
import re
import sys


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add what installing `name[extras]` brings to `seen`: (canonical name, its extras)."""
    if (canonical(name), extras) in seen:
        return
    seen.add((canonical(name), extras))
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # a requirement of another platform
        return
    for line in lines:
        match = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[(.*?)\])?", line)
        assert match, line
        asked_for = set(re.findall(r"""extra == ['"]([^'"]+)""", line))
        if not asked_for or asked_for & extras:
            required(match[1], frozenset(re.findall(r"[\w-]+", match[2] or "")), seen)


def closure(name: str) -> list[str]:
    seen: set[tuple[str, frozenset[str]]] = set()
    required(name, frozenset(), seen)
    return sorted({need for need, _ in seen})


def main(module: str, distribution: str, *optional: str) -> None:
    owners = metadata.packages_distributions()  # first: an import may add its vendored copies to the path (setuptools)
    before = set(sys.modules)
    package = importlib.import_module(module)
    modules = [module]
    folders = [(package.__path__, module + ".")]
    for path, prefix in folders:
        for info in pkgutil.iter_modules(path, prefix):
            if info.name in optional:
                continue
            imported = importlib.import_module(info.name)
            modules.append(info.name)
            if info.ispkg:
                folders.append((imported.__path__, info.name + "."))
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    report = {
        "modules": modules,
        "loaded": sorted({canonical(owner) for name in loaded for owner in owners.get(name, [])}),
        "required": closure(distribution),
        "versions": {canonical(one.name): one.version for one in metadata.distributions()},
        "installed": sorted({canonical(owner) for names in owners.values() for owner in names}),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
