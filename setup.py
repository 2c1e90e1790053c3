"""Builds the native CPU kernels, where there is a C++17 compiler; without them XLA's serve."""

from __future__ import annotations

import glob
import os
import platform
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = "jaxrec/embed/kernels/native"


class build_library(build_ext):
    """Builds a plain shared library, of no Python version, if it can be built."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            say(f"the native CPU kernels were not built ({error})")

    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", "/") + ".so"

    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []


class platform_wheel(bdist_wheel):
    """Tags a wheel that holds the library by its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


def native_kernels() -> list[Extension]:
    if os.environ.get("JAXREC_NO_NATIVE") == "1":
        say("JAXREC_NO_NATIVE=1: the native CPU kernels are not built")
        return []
    if platform.machine().lower() not in ("x86_64", "amd64", "arm64", "aarch64"):
        say(f"there are no native CPU kernels for {platform.machine()}")
        return []
    try:
        import jaxlib
    except ImportError:
        say("the native CPU kernels were not built (jaxlib, whose headers they need, is missing)")
        return []
    # Instruction sets are chosen inside the sources, so that one library serves all machines.
    flags = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-w"]
    return [
        Extension(
            "jaxrec.embed.kernels.native.libjaxrec",
            sources=sorted(glob.glob(f"{NATIVE}/*.cc")),
            depends=sorted(glob.glob(f"{NATIVE}/*.h")),
            define_macros=[("JAXREC_JAXLIB", f'"{jaxlib.__version__}"')],
            include_dirs=[os.path.join(os.path.dirname(jaxlib.__file__), "include")],
            extra_compile_args=flags,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ]


def say(what: str) -> None:
    print(f"jaxrec: {what}; lookups and updates on CPUs run in XLA", file=sys.stderr)


extensions = native_kernels()
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": build_library, "bdist_wheel": platform_wheel} if extensions else {},
)
