#include "jaxrec/serving/model.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "artifact.h"
#include "batch_ladder.h"
#include "jaxrec/serving/error.h"

namespace jaxrec::serving {

namespace fs = std::filesystem;

struct Model::State {
  Artifact artifact;
  std::vector<std::unique_ptr<const Program>> programs;  // in the order of the batch sizes
  std::optional<Encoder> encoder;

  State(const fs::path& path, std::shared_ptr<Runtime> runtime, bool verify)
      : artifact(path, std::move(runtime), verify) {
    if (artifact.manifest.ranker) {
      throw ArtifactError(path.string() +
                          " is a ranker with caches of histories; load it by Ranker::load");
    }
    for (const BatchSize& size : artifact.manifest.batch.sizes) {
      programs.push_back(program_of(size.samples));
    }
    if (artifact.manifest.encoding) encoder.emplace(path, artifact.manifest);
  }

  std::unique_ptr<const Program> program_of(int64_t samples) const {
    const auto& files = artifact.manifest.programs;
    const auto file = std::find_if(files.begin(), files.end(), [&](const ProgramFile& each) {
      return each.platform == "cpu" && each.samples == samples;
    });
    if (file == files.end()) {
      throw ArtifactError(artifact.directory.string() + " has no program for " +
                          std::to_string(samples) +
                          " samples on CPUs; export the model with platforms=('cpu',)");
    }
    if (!file->stablehlo) {
      throw ArtifactError((artifact.directory / file->file).string() +
                          " has no StableHLO beside it: an earlier jaxrec exported the model; "
                          "export it again");
    }
    std::vector<ResultSpec> results;
    for (const ArraySpec& output : artifact.manifest.outputs) {
      std::vector<int64_t> shape = {samples};
      shape.insert(shape.end(), output.shape.begin(), output.shape.end());
      results.push_back({output.dtype, std::move(shape)});
    }
    const ProgramSource source{file->file, *file->stablehlo, file->targets};
    return std::make_unique<const Program>(artifact, source, std::move(results));
  }

  // Predicts a chunk; its scores go to their place among those of the request.
  void predict(const Request& request, const Chunk& chunk, Scores& scores) const {
    const PackedChunk packed = pack(artifact.manifest.batch, request, chunk);
    Arguments arguments = artifact.arguments();
    RuntimeArrays batch;
    for (const HostArray& each : packed.arrays) {
      batch.push_back(artifact.runtime->share(each));
      arguments.push_back(batch.back().get());
    }
    const RuntimeArrays results = programs[chunk.size]->executable().run(arguments);
    const auto start = static_cast<size_t>(chunk.start);
    const auto count = static_cast<size_t>(chunk.stop - chunk.start);
    for (size_t i = 0; i < scores.outputs.size(); ++i) {
      const size_t bytes = artifact.manifest.outputs[i].bytes();
      std::copy_n(results[i]->data(), count * bytes, scores.outputs[i].data() + start * bytes);
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

const Manifest& Model::manifest() const { return state_->artifact.manifest; }

Request Model::decode(std::string_view json) const {
  if (state_->encoder) return state_->encoder->decode(json);
  if (!manifest().has_encoder) return decode_request(manifest(), json);
  const std::string reason = manifest().no_encoding.value_or(
      "an earlier jaxrec exported the model; export it again");
  throw ArtifactError(state_->artifact.directory.string() +
                      " has no encoding of columns for C++: " + reason);
}

Scores Model::predict(const Request& request) const {
  check_request(manifest(), request);
  Scores scores;
  scores.samples = request.samples;
  for (const ArraySpec& output : manifest().outputs) {
    scores.outputs.emplace_back(output.bytes() * static_cast<size_t>(request.samples));
  }
  for (int64_t start = 0; start < request.samples;) {
    const Chunk chunk = next_chunk(manifest().batch, request, start);
    state_->predict(request, chunk, scores);
    start = chunk.stop;
  }
  return scores;
}

void Model::warm_up() const {
  for (const auto& program : state_->programs) program->executable();
}

}  // namespace jaxrec::serving
