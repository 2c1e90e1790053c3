"""Builds of ``cpp/`` for tests, and runs of its program."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import jaxrec
import jaxrec.embed.kernels

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "cpp"
NATIVE_LIBRARY = pathlib.Path(jaxrec.embed.kernels.__file__).parent / "native" / "libjaxrec.so"

# Directory that `bash cpp/get_pjrt.sh DIRECTORY` filled.
PJRT = os.environ.get("JAXREC_PJRT")

HEADERS = {
    "zlib.h": "zlib1g-dev",
    "xxhash.h": "libxxhash-dev",
    "nlohmann/json.hpp": "nlohmann-json3-dev",
    "CLI/CLI.hpp": "libcli11-dev",
}

# The checks are compiled from a few files that include the sources, in half of the time. The
# programs, compiled file by file as users do, show that each source includes what it uses.
CHECKS = ("-DJAXREC_ONLY_PARSERS=ON", "-DCMAKE_UNITY_BUILD=ON")

# Directory and option of the builds with sanitizers.
SANITIZERS = {
    "addresses": ("fuzz", "-DJAXREC_SANITIZE=ON"),
    "threads": ("threads", "-DJAXREC_SANITIZE_THREADS=ON"),
}


@functools.cache
def missing(with_runtime: bool) -> str | None:
    """Return what the tests of C++ lack; None: nothing.

    With JAXREC_PJRT set nothing may be missing: the build then says what is.
    """
    if PJRT is not None:
        return None
    if with_runtime:
        return "JAXREC_PJRT is not set to a directory that cpp/get_pjrt.sh filled"
    for program in ("cmake", os.environ.get("CXX", "g++")):
        if shutil.which(program) is None:
            return f"there is no {program}"
    for header, package in HEADERS.items():
        if not any(
            pathlib.Path(place, header).exists() for place in ("/usr/include", "/usr/local/include")
        ):
            return f"there is no {header}, which the package {package} has"
    return None


@functools.cache
def build(kind: str, *options: str, target: str = "all") -> pathlib.Path:
    """Build ``cpp/`` and return the directory; JAXREC_CPP_BUILD keeps it for the next run."""
    kept = os.environ.get("JAXREC_CPP_BUILD")
    directory = pathlib.Path(kept or tempfile.mkdtemp(prefix="jaxrec-cpp-")) / kind
    options = (*options, "-DCMAKE_CXX_FLAGS_RELEASE=-O1")  # quickly rather than fast
    _run(["cmake", "-S", str(SOURCES), "-B", str(directory), *options])
    jobs = str(os.cpu_count())
    _run(["cmake", "--build", str(directory), "--parallel", jobs, "--target", target])
    return directory


def build_programs() -> pathlib.Path:
    """Build everything but the checks."""
    include = f"-DJAXREC_PJRT_INCLUDE={PJRT}/include"
    return build("programs", include, target="jaxrec_predict")


def build_fuzz() -> pathlib.Path:
    """Build the fuzz test with sanitizers; return its program."""
    return build("fuzz", *CHECKS, "-DJAXREC_SANITIZE=ON", target="jaxrec_fuzz") / "jaxrec_fuzz"


def build_threads() -> pathlib.Path:
    """Build the check of threads with its sanitizer; return its program."""
    options = (*CHECKS, "-DJAXREC_SANITIZE_THREADS=ON")
    return build("threads", *options, target="jaxrec_threads") / "jaxrec_threads"


def build_caches(sanitizer: str) -> pathlib.Path:
    """Build the check of a ranker's caches with a sanitizer of `SANITIZERS`; return its program."""
    kind, option = SANITIZERS[sanitizer]
    return build(kind, *CHECKS, option, target="jaxrec_caches") / "jaxrec_caches"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


class Answers(NamedTuple):
    """Result of a run of ``jaxrec_predict``.

    Attributes:
        code: Exit code.
        lines: Its answers.
        error: Its messages.
    """

    code: int
    lines: list[dict[str, Any]]
    error: str


def command(
    model: pathlib.Path,
    *options: str,
    plugin: str = f"{PJRT}/plugin.so",
    native_library: str = str(NATIVE_LIBRARY),
) -> list[str]:
    """Return the command of ``jaxrec_predict`` for a model."""
    program = str(build_programs() / "jaxrec_predict")
    libraries = ("--plugin", plugin, "--native-library", native_library)
    return [program, str(model), *options, *libraries]


def environment() -> dict[str, str]:
    """Return the environment of ``jaxrec_predict``: this one, without the flags of its XLA."""
    # The tests' flags (tests/quick.py) are those of this process.
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def predict(
    model: pathlib.Path,
    requests: Sequence[str] = (),
    *options: str,
    plugin: str = f"{PJRT}/plugin.so",
    native_library: str = str(NATIVE_LIBRARY),
) -> Answers:
    """Run ``jaxrec_predict`` on requests in JSON."""
    text = "".join(request + "\n" for request in requests)
    done = subprocess.run(
        command(model, *options, plugin=plugin, native_library=native_library),
        input=text.encode(),
        capture_output=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode in (0, 1, 2), done.stderr.decode()  # no signal
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return Answers(done.returncode, lines, done.stderr.decode())


def columns(*batch: Any) -> dict[str, Any]:
    """Return the arguments of a model's function as the columns of a request."""
    columns: dict[str, Any] = {}
    for number, each in enumerate(batch):
        if isinstance(each, jaxrec.KeyedJaggedArray):
            columns |= each.to_lists()
            if each.weights is not None:
                for key in each.keys:
                    weights = jaxrec.JaggedArray(each[key].weights, each[key].lengths).to_lists()
                    columns[f"{key}.weights"] = weights
        else:
            columns[f"input{number}"] = np.asarray(each).tolist()
    return columns
