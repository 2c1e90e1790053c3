"""Checks the files of a release: what is in them, and that they install and train.

    python .ci/check_wheels.py DIRECTORY

``DIRECTORY`` has the wheels and the source distribution that ``.ci/wheels`` builds. The wheel of
this machine and the source distribution (without a compiler) are installed into new environments,
where a model is trained. Wheels of other machines are only looked into.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 5_000_000  # bytes of a file of the release
LIBRARIES = {
    "jaxrec/embed/kernels/native/libjaxrec.so",
    "jaxrec/tier/native/libjaxrec_tier.so",
}
NEEDED = {"jaxrec/py.typed", "jaxrec/serve/http/page.html", "jaxrec/__init__.py"}
TRAIN = ["train", "--data.generated-rows", "200000", "--output", "run"]


def check_names(path: Path, names: set[str], needed: set[str], kinds: set[str]) -> None:
    """Fail if a file lacks ``needed`` names, has names of other kinds, or is too large."""
    missing = sorted(needed - names)
    strange = sorted(
        name
        for name in names
        if name.startswith(("tests/", "docs/", "benchmarks/"))
        or (name.startswith("jaxrec/") and Path(name).suffix not in kinds)
    )
    if missing or strange:
        sys.exit(f"{path.name}: lacks {missing}, and should not have {strange}")
    if path.stat().st_size > LARGEST:
        sys.exit(f"{path.name}: {path.stat().st_size:,} bytes; at most {LARGEST:,} are meant")
    print(f"{path.name}: {len(names)} files, {path.stat().st_size:,} bytes")


def wheel_names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as wheel:
        return set(wheel.namelist())


def source_names(path: Path) -> set[str]:
    """Return the names of files, without the folder that has the version."""
    with tarfile.open(path) as archive:
        return {each.name.partition("/")[2] for each in archive if each.isfile()}


def is_of_this_machine(path: Path) -> bool:
    system = {"Linux": "manylinux", "Darwin": "macosx"}[platform.system()]
    return path.stem.endswith(platform.machine()) and system in path.stem


def train(path: Path, **environment: str) -> None:
    """Install a file of the release into a new environment, and train there from a cold start."""
    with tempfile.TemporaryDirectory() as directory:
        scripts = Path(directory) / "environment" / "bin"
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # A cache of compiled programs would make the start warm.
        settings = {**clean, "XDG_CACHE_HOME": directory, **environment}

        def run(*command: str | Path) -> float:
            start = time.monotonic()
            quiet = subprocess.DEVNULL
            subprocess.run(command, cwd=directory, env=settings, check=True, stdout=quiet)
            return time.monotonic() - start

        run(sys.executable, "-m", "venv", scripts.parent)
        pip = [scripts / "python", "-m", "pip", "install", "--quiet"]
        whole = run(*pip, path)
        alone = run(*pip, "--force-reinstall", "--no-deps", path)
        trained = run(scripts / "jaxrec", *TRAIN)
        print(
            f"{path.name}: installed in {whole:.0f} s, {alone:.0f} s without what it depends on; "
            f"jaxrec {' '.join(TRAIN[:3])} took {trained:.0f} s"
        )


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1]).resolve()
    wheels, sources = sorted(directory.glob("*.whl")), sorted(directory.glob("*.tar.gz"))
    if not wheels or len(sources) != 1:
        sys.exit(f"{directory} has {len(wheels)} wheels and {len(sources)} source distributions")
    for wheel in wheels:
        check_names(
            wheel, wheel_names(wheel), NEEDED | LIBRARIES, {".py", ".so", ".html", ".typed"}
        )
    files = [path.relative_to(ROOT) for path in (ROOT / "jaxrec").rglob("*")]
    native = {path.as_posix() for path in files if path.suffix in (".cc", ".h")}
    kinds = {".py", ".html", ".typed", ".cc", ".h"}
    check_names(sources[0], source_names(sources[0]), NEEDED | native, kinds)
    mine = [wheel for wheel in wheels if is_of_this_machine(wheel)]
    if not mine:
        sys.exit(f"{directory} has no wheel for this machine")
    for wheel in mine:
        train(wheel)
    train(sources[0], CC="false", CXX="false")


if __name__ == "__main__":
    main()
