#include "artifact.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "checksums.h"
#include "jaxrec/serving/error.h"
#include "program_calls.h"

namespace jaxrec::serving {
namespace {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file) throw ArtifactError(path.string() + " cannot be read: " + std::strerror(errno));
  return content.str();
}

HostArray read_array(const fs::path& path, const MappedFile& file, const StoredArray& stored) {
  NpyHeader header;
  try {
    header = read_npy_header(file.bytes());
  } catch (const std::invalid_argument& error) {
    throw ArtifactError(path.string() + " cannot be used: " + error.what());
  }
  if (header.type != npy_type(stored.dtype) || header.shape != stored.shape) {
    throw ArtifactError(path.string() + " holds another array than the model's " + stored.name);
  }
  return {file.bytes().data() + header.data_start, stored.dtype, stored.shape};
}

// Returns a program that calls what its manifest declares and this library knows.
std::string checked_program(const fs::path& path, const std::vector<std::string>& targets) {
  std::string program = read_file(path);
  try {
    check_calls(program_calls(program), targets);
  } catch (const std::exception& error) {
    throw ArtifactError(path.string() + " cannot be used: " + error.what());
  }
  return program;
}

}  // namespace

Manifest read_manifest(const fs::path& directory) {
  const fs::path path = directory / "manifest.json";
  if (!fs::is_regular_file(path)) {
    throw ArtifactError(directory.string() +
                        " is not an exported model: manifest.json is missing; jaxrec export and "
                        "jaxrec.serve.export write one");
  }
  try {
    return parse_manifest(read_file(path));
  } catch (const ArtifactError& error) {
    throw ArtifactError(path.string() + " cannot be used: " + error.what());
  }
}

Artifact::Artifact(const fs::path& path, std::shared_ptr<Runtime> with, bool verify)
    : directory(path), manifest(read_manifest(path)), runtime(std::move(with)) {
  check_files(directory, manifest.files, verify);
  for (const StoredArray& stored : manifest.arrays) {
    files.emplace_back(directory / stored.file);
    arrays.push_back(runtime->share(read_array(directory / stored.file, files.back(), stored)));
  }
}

Arguments Artifact::arguments() const {
  Arguments arguments;
  for (const auto& each : arrays) arguments.push_back(each.get());
  return arguments;
}

Program::Program(const Artifact& artifact, const ProgramSource& source,
                 std::vector<ResultSpec> results)
    : artifact_(artifact),
      path_(artifact.directory / source.stablehlo),
      results_(std::move(results)) {
  for (const std::string& target : source.targets) {
    try {
      artifact.runtime->register_target(target);
    } catch (const ArtifactError& error) {
      throw ArtifactError((artifact.directory / source.file).string() + " calls " + target + ": " +
                          error.what());
    }
  }
  stablehlo_ = checked_program(path_, source.targets);
}

const Executable& Program::executable() const {
  std::call_once(once_, [this] {
    try {
      executable_ = artifact_.runtime->compile(stablehlo_, results_);
      stablehlo_.clear();
    } catch (const ArtifactError& error) {
      throw ArtifactError(path_.string() + " cannot be used: " + error.what());
    }
  });
  return *executable_;
}

}  // namespace jaxrec::serving
