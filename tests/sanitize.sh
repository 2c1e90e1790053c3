#!/usr/bin/env bash
# Checks the native libraries under the sanitizers of addresses, undefined behaviour and threads.
# Needs a C++17 compiler with the sanitizers (CXX, g++ by default); no Python, no XLA.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# The address sanitizer finds accesses outside of objects itself, so that undefined behaviour's check of their
# sizes would test each pointer twice and take the compiler longer. Reports name lines, for which
# -g1 has enough.
#
# compile SANITIZERS INCLUDES SOURCE OBJECT
compile() {
    "${CXX:-g++}" -std=c++17 -O1 -g1 -fsanitize="$1" -fno-sanitize=object-size \
        -fno-sanitize-recover=all \
        -Wall -Wextra -Werror -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized \
        -I"$2" -c "$3" -o "$4"
}

# check SANITIZERS PACKAGE: compiles and runs the package's native sources with their check.
check() {
    local native=$root/jaxrec/$2/native objects jobs=() source
    objects=$(mktemp -d -p "$out")
    for source in "$native"/*.cc "$root/tests/$2/native_check.cc"; do
        [[ $source == */ffi.cc ]] && continue
        compile "$1" "$native" "$source" "$objects/$(basename "$source").o" &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job"; done
    "${CXX:-g++}" -fsanitize="$1" "$objects"/*.o -o "$objects/check" -pthread
    "$objects/check"
}

for sanitizers in address,undefined thread; do
    echo "=== $sanitizers"
    check "$sanitizers" embed/kernels
    check "$sanitizers" tier
done
