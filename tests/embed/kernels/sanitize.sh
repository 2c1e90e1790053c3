#!/usr/bin/env bash
# Checks the native kernels under the sanitizers of addresses, of undefined behaviour and of threads.
# Needs a C++17 compiler with the sanitizers (CXX, g++ by default); no Python, no XLA.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
native=$here/../../../jaxrec/embed/kernels/native
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# compile SANITIZERS SOURCE
compile() {
    "${CXX:-g++}" -std=c++17 -O1 -g -fsanitize="$1" -fno-sanitize-recover=all \
        -Wall -Wextra -Werror -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized \
        -I"$native" -c "$2" -o "$out/$(basename "$2").o"
}

for sanitizers in address,undefined thread; do
    echo "=== $sanitizers"
    jobs=()
    for source in "$native"/*.cc "$here/native_check.cc"; do
        [[ $source == */ffi.cc ]] && continue
        compile "$sanitizers" "$source" &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job"; done
    "${CXX:-g++}" -fsanitize="$sanitizers" "$out"/*.o -o "$out/check" -pthread
    "$out/check"
done
