// What a program calls outside of itself, of what this library knows.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace jaxrec::serving {

// Returns the targets of a program's custom calls and the names of its transfers to the host; some
// of them may be in code that never runs.
//
// `bytecode` is a portable StableHLO artifact, in MLIR's format of bytecode:
// https://mlir.llvm.org/docs/BytecodeFormat/. What this function does not understand it refuses, so
// that no call stays hidden. Throws std::invalid_argument.
std::set<std::string> program_calls(std::string_view bytecode);

// Throws ArtifactError where a program calls what is neither known nor declared.
void check_calls(const std::set<std::string>& calls, const std::vector<std::string>& declared);

}  // namespace jaxrec::serving
