// Compiles and runs StableHLO programs on this machine's CPU, by a PJRT plugin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jaxrec/serving/dtype.h"

namespace jaxrec::serving {

// An array in this process's memory, row-major.
struct HostArray {
  const void* data;
  DType dtype;
  std::vector<int64_t> shape;
};

struct RuntimeOptions {
  std::string plugin;          // shared library with GetPjrtApi
  std::string native_library;  // libjaxrec.so; empty: programs that call its functions are refused
};

// An array that programs read where it lies: in memory of the caller, or where a program left it.
// Nothing changes it, so that several threads may read it at once.
class RuntimeArray {
 public:
  virtual ~RuntimeArray() = default;

  // Its elements, row-major, for as long as the array lives.
  virtual const std::byte* data() const = 0;

  // Bytes of its elements.
  virtual size_t bytes() const = 0;
};

using Arguments = std::vector<const RuntimeArray*>;
using RuntimeArrays = std::vector<std::unique_ptr<const RuntimeArray>>;

// A compiled program; several threads may run it at once.
class Executable {
 public:
  virtual ~Executable() = default;

  // Runs the program to its end. The results stay where the program left them, and may be arguments
  // of other programs.
  virtual RuntimeArrays run(const Arguments& arguments) const = 0;
};

struct ResultSpec {
  DType dtype;
  std::vector<int64_t> shape;
};

// One per process: a plugin keeps registered functions for the life of the process.
class Runtime {
 public:
  virtual ~Runtime() = default;

  // Throws ArtifactError where a library cannot be loaded, or is another library.
  static std::shared_ptr<Runtime> open(const RuntimeOptions& options);

  // Lets programs call a function of the native library, such as "jaxrec.pooled_lookup.v1".
  //
  // Throws ArtifactError where the library lacks it.
  virtual void register_target(const std::string& target) = 0;

  // Returns an array of the runtime; `array` must stay in memory, unchanged, as long as it lives.
  virtual std::unique_ptr<const RuntimeArray> share(const HostArray& array) const = 0;

  // Compiles a program whose results are `results`.
  //
  // Throws ArtifactError where it does not compile or has other results.
  virtual std::unique_ptr<Executable> compile(std::string_view stablehlo,
                                              const std::vector<ResultSpec>& results) = 0;
};

}  // namespace jaxrec::serving
