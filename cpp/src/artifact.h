// The folder of an exported model: its manifest, the arrays that all programs take, and programs.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "jaxrec/serving/manifest.h"
#include "jaxrec/serving/runtime.h"
#include "npy.h"

namespace jaxrec::serving {

struct Artifact {
  std::filesystem::path directory;
  Manifest manifest;
  std::shared_ptr<Runtime> runtime;
  std::vector<MappedFile> files;
  RuntimeArrays arrays;  // they lie in the files

  // Throws ArtifactError where the folder holds no exported model, or a damaged one; `verify`
  // compares all files with their checksums.
  Artifact(const std::filesystem::path& path, std::shared_ptr<Runtime> with, bool verify);

  // Returns the arguments that a program begins with.
  Arguments arguments() const;
};

// Files of a program, as the manifest has them.
struct ProgramSource {
  std::string file;
  std::string stablehlo;
  std::vector<std::string> targets;
};

// A program that compiles when it is first needed; several threads may need it at once.
class Program {
 public:
  // Throws ArtifactError where the program calls what its manifest does not declare, or what this
  // process lacks. The artifact must outlive the program.
  Program(const Artifact& artifact, const ProgramSource& source, std::vector<ResultSpec> results);

  // Throws ArtifactError where it does not compile, or has other results.
  const Executable& executable() const;

 private:
  const Artifact& artifact_;
  const std::filesystem::path path_;
  const std::vector<ResultSpec> results_;
  mutable std::string stablehlo_;  // until it is compiled
  mutable std::once_flag once_;
  mutable std::unique_ptr<Executable> executable_;
};

}  // namespace jaxrec::serving
