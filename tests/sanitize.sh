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
flags=(-std=c++17 -Og -g1 -fno-sanitize=object-size -fno-sanitize-recover=all
    -Wall -Wextra -Werror -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized)

# Each access of a kernel calls the address sanitizer: with the check's code beside each of them GCC takes
# half as long again. Only GCC has this parameter.
calls=(--param asan-instrumentation-with-call-threshold=0)
"${CXX:-g++}" -Werror "${calls[@]}" -fsanitize=address -fsyntax-only -x c++ /dev/null 2>/dev/null || calls=()

# compile SANITIZERS INCLUDES SOURCE OBJECT
compile() {
    local source=$3 only=()
    case $1:${source##*/} in
        address,undefined:kernels_portable.cc) only=("${calls[@]}") ;;
        # All instruction sets are compiled from the same templates, whose pointers are checked once,
        # for the portable one. What is computed may depend on the width of vectors.
        address,undefined:kernels_avx*.cc)
            only=("${calls[@]}" -fno-sanitize=null,alignment,pointer-overflow)
            ;;
        # Threads share rows in the same way with any width: the narrowest and the widest vectors do,
        # whose remainders differ most.
        thread:kernels_avx2.cc)
            if grep -qsw avx512vl /proc/cpuinfo; then
                source=$out/no_avx2.cc
                echo 'namespace jaxrec {
                      struct Kernels;
                      const Kernels* avx2_kernels() { return nullptr; }
                      }' >"$source"
            fi
            ;;
    esac
    "${CXX:-g++}" "${flags[@]}" -fsanitize="$1" "${only[@]}" -I"$2" -c "$source" -o "$4"
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
