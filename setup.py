"""Builds the native libraries where there is a C++17 compiler; without them XLA and NumPy serve."""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = "jaxrec/embed/kernels/native"
ID_MAPS = "jaxrec/tier/native"
# Of the machine that is built for.
MACHINE = sysconfig.get_platform().split("-")[-1]
IS_X86 = MACHINE in ("x86_64", "amd64")


class build_library(build_ext):
    """Builds plain shared libraries, of no Python version, those that can be built."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if os.environ.get("JAXREC_REQUIRE_NATIVE") == "1":
                raise
            say(f"the native libraries were not built ({error})")

    def build_extensions(self) -> None:
        compile = self.compiler.compile

        def compile_one(
            source: str, extra_postargs: list[str] | None = None, **settings: Any
        ) -> list[str]:
            flags = [*(extra_postargs or []), *flags_of(source)]
            return compile([source], extra_postargs=flags, **settings)

        def compile_beside(sources: list[str], **settings: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                parts = threads.map(lambda source: compile_one(source, **settings), sources)
                return [built for part in parts for built in part]

        self.compiler.compile = compile_beside
        self.parallel = True  # libraries, too
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        try:
            super().build_extension(extension)
        except Exception as error:
            if os.environ.get("JAXREC_REQUIRE_NATIVE") == "1":
                raise
            say(f"{extension.name} was not built ({error})")

    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", "/") + ".so"

    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []


class platform_wheel(bdist_wheel):
    """Tags a wheel that holds the library by its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


def native_libraries() -> list[Extension]:
    if os.environ.get("JAXREC_NO_NATIVE") == "1":
        say("JAXREC_NO_NATIVE=1: the native libraries are not built")
        return []
    if not IS_X86 and MACHINE not in ("arm64", "aarch64", "universal2"):
        say(f"there are no native libraries for {MACHINE}")
        return []
    libraries = [library("jaxrec.tier.native.libjaxrec_tier", ID_MAPS)]
    try:
        import jaxlib
    except ImportError:
        say("the native CPU kernels were not built (jaxlib, whose headers they need, is missing)")
        return libraries
    kernels = library(
        "jaxrec.embed.kernels.native.libjaxrec",
        KERNELS,
        define_macros=[("JAXREC_JAXLIB", f'"{jaxlib.__version__}"')],
        include_dirs=[os.path.join(os.path.dirname(jaxlib.__file__), "include")],
    )
    return [kernels, *libraries]


def flags_of(source: str) -> list[str]:
    # Of x86-64 machines only those without AVX2 run them: they are compiled quickly.
    is_fallback = IS_X86 and os.path.basename(source) == "kernels_portable.cc"
    return ["-O1"] if is_fallback else []


def library(name: str, directory: str, **settings: Any) -> Extension:
    # Instruction sets are chosen inside the sources, so that one library serves all machines.
    # Products are rounded with their sums, as GCC does by itself, by Clang, too.
    numbers = ["-fno-math-errno", "-ffp-contract=fast"]
    flags = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-w", *numbers]
    return Extension(
        name,
        sources=sorted(glob.glob(f"{directory}/*.cc")),
        depends=sorted(glob.glob(f"{directory}/*.h")),
        extra_compile_args=flags,
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
        **settings,
    )


def say(what: str) -> None:
    print(f"jaxrec: {what}; XLA and NumPy do the work on CPUs", file=sys.stderr)


extensions = native_libraries()
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": build_library, "bdist_wheel": platform_wheel} if extensions else {},
)
