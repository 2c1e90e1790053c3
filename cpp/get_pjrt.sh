#!/usr/bin/env bash
# Puts XLA's PJRT plugin for CPUs, and the headers that cpp/ is built with, into a directory:
#
#     bash cpp/get_pjrt.sh pjrt    # pjrt/plugin.so, pjrt/include
#
# Both come from wheels of PyPI, which `pip download` reads: the plugin from lammps-jax-pjrt-cpu
# (63 MB), the headers from tensorflow-cpu (274 MB, of which two files are kept). PYTHON names the
# Python whose pip is used, python3 by default.
set -euo pipefail

[[ $# == 1 ]] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
mkdir -p "$1"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels" \
    lammps-jax-pjrt-cpu==0.11.2 tensorflow-cpu==2.21.0

"${PYTHON:-python3}" - "$1" "$wheels"/*.whl <<'END'
import pathlib
import sys
import zipfile

directory = pathlib.Path(sys.argv[1])
places = {
    "pjrt_c_api_cpu_plugin.so": "plugin.so",
    "xla/pjrt/c/pjrt_c_api.h": "include/xla/pjrt/c/pjrt_c_api.h",
    "xla/pjrt/c/pjrt_c_api_ffi_extension.h": "include/xla/pjrt/c/pjrt_c_api_ffi_extension.h",
}
for path in sys.argv[2:]:
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            for end, place in places.items():
                if name.endswith("/" + end):
                    target = directory / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(wheel.read(name))
missing = [place for place in places.values() if not (directory / place).is_file()]
if missing:
    sys.exit(f"the wheels lack {', '.join(missing)}")
END
