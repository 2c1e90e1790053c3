#include "jaxrec/serving/model.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>

#include "batch_ladder.h"
#include "checksums.h"
#include "jaxrec/serving/error.h"
#include "npy.h"
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

// The program of one batch size, which compiles when it is first needed.
struct Program {
  const ProgramFile* file = nullptr;
  std::string stablehlo;  // until it is compiled
  std::once_flag once;
  std::unique_ptr<Executable> executable;
};

}  // namespace

struct Model::State {
  fs::path directory;
  Manifest manifest;
  std::shared_ptr<Runtime> runtime;
  std::vector<MappedFile> files;
  std::vector<std::unique_ptr<RuntimeArray>> arrays;  // they lie in the files
  mutable std::vector<Program> programs;              // in the order of the batch sizes
  std::optional<Encoder> encoder;

  State(const fs::path& path, std::shared_ptr<Runtime> with, bool verify)
      : directory(path),
        manifest(read_manifest(path)),
        runtime(std::move(with)),
        programs(manifest.batch.sizes.size()) {
    check_files(directory, manifest.files, verify);
    find_programs();
    for (const StoredArray& stored : manifest.arrays) {
      files.emplace_back(directory / stored.file);
      arrays.push_back(
          runtime->share(read_array(directory / stored.file, files.back(), stored)));
    }
    if (manifest.encoding) encoder.emplace(directory, manifest);
  }

  void find_programs() {
    for (size_t i = 0; i < programs.size(); ++i) {
      const int64_t samples = manifest.batch.sizes[i].samples;
      for (const ProgramFile& each : manifest.programs) {
        if (each.platform == "cpu" && each.samples == samples) programs[i].file = &each;
      }
      const ProgramFile* file = programs[i].file;
      if (file == nullptr) {
        throw ArtifactError(directory.string() + " has no program for " +
                            std::to_string(samples) +
                            " samples on CPUs; export the model with platforms=('cpu',)");
      }
      const std::string path = (directory / file->file).string();
      if (!file->stablehlo) {
        throw ArtifactError(path + " has no StableHLO beside it: an earlier jaxrec exported the "
                            "model; export it again");
      }
      for (const std::string& target : file->targets) {
        try {
          runtime->register_target(target);
        } catch (const ArtifactError& error) {
          throw ArtifactError(path + " calls " + target + ": " + error.what());
        }
      }
      programs[i].stablehlo = checked_program(*file);
    }
  }

  // Returns a program that calls what its manifest declares and this library knows.
  std::string checked_program(const ProgramFile& file) const {
    const fs::path path = directory / *file.stablehlo;
    std::string program = read_file(path);
    try {
      check_calls(program_calls(program), file.targets);
    } catch (const std::exception& error) {
      throw ArtifactError(path.string() + " cannot be used: " + error.what());
    }
    return program;
  }

  const Executable& executable(size_t size) const {
    Program& program = programs[size];
    std::call_once(program.once, [&] {
      const fs::path path = directory / *program.file->stablehlo;
      std::vector<ResultSpec> results;
      for (const ArraySpec& output : manifest.outputs) {
        std::vector<int64_t> shape = {program.file->samples};
        shape.insert(shape.end(), output.shape.begin(), output.shape.end());
        results.push_back({output.dtype, std::move(shape)});
      }
      try {
        program.executable = runtime->compile(program.stablehlo, results);
        program.stablehlo.clear();
      } catch (const ArtifactError& error) {
        throw ArtifactError(path.string() + " cannot be used: " + error.what());
      }
    });
    return *program.executable;
  }

  // Predicts a chunk; its scores go to their place among those of the request.
  void predict(const Request& request, const Chunk& chunk, Scores& scores) const {
    const PackedChunk packed = pack(manifest.batch, request, chunk);
    const auto samples = static_cast<size_t>(manifest.batch.sizes[chunk.size].samples);
    const auto start = static_cast<size_t>(chunk.start);
    const auto count = static_cast<size_t>(chunk.stop - chunk.start);
    std::vector<std::vector<std::byte>> padded(scores.outputs.size());
    std::vector<void*> results;
    for (size_t i = 0; i < scores.outputs.size(); ++i) {
      const size_t bytes = manifest.outputs[i].bytes();
      if (count == samples) {
        results.push_back(scores.outputs[i].data() + start * bytes);
      } else {
        padded[i].resize(samples * bytes);
        results.push_back(padded[i].data());
      }
    }
    executable(chunk.size).run(arrays, packed.arrays, results);
    if (count == samples) return;
    for (size_t i = 0; i < scores.outputs.size(); ++i) {
      const size_t bytes = manifest.outputs[i].bytes();
      std::copy_n(padded[i].data(), count * bytes, scores.outputs[i].data() + start * bytes);
    }
  }
};

std::shared_ptr<const Model> Model::load(const fs::path& directory,
                                         std::shared_ptr<Runtime> runtime, bool verify) {
  return std::shared_ptr<const Model>(
      new Model(std::make_unique<State>(directory, std::move(runtime), verify)));
}

Model::Model(std::unique_ptr<State> state) : state_(std::move(state)) {}
Model::~Model() = default;

const Manifest& Model::manifest() const { return state_->manifest; }

Request Model::decode(std::string_view json) const {
  if (state_->encoder) return state_->encoder->decode(json);
  if (!manifest().has_encoder) return decode_request(manifest().batch, json);
  throw ArtifactError(state_->directory.string() +
                      " has no encoding of columns for C++: an earlier jaxrec exported the model; "
                      "export it again");
}

Scores Model::predict(const Request& request) const {
  const Manifest& manifest = state_->manifest;
  check_request(manifest.batch, request);
  Scores scores;
  scores.samples = request.samples;
  for (const ArraySpec& output : manifest.outputs) {
    scores.outputs.emplace_back(output.bytes() * static_cast<size_t>(request.samples));
  }
  for (int64_t start = 0; start < request.samples;) {
    const Chunk chunk = next_chunk(manifest.batch, request, start);
    state_->predict(request, chunk, scores);
    start = chunk.stop;
  }
  return scores;
}

void Model::warm_up() const {
  for (size_t i = 0; i < state_->programs.size(); ++i) state_->executable(i);
}

}  // namespace jaxrec::serving
