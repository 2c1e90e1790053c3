#include "jaxrec/serving/ranker.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "artifact.h"
#include "jaxrec/serving/error.h"
#include "jaxrec/serving/request.h"
#include "row_scorer.h"

namespace jaxrec::serving {
namespace {

namespace fs = std::filesystem;

// The programs of an exported ranker for CPUs.
class ArtifactPrograms final : public RankerPrograms {
 public:
  // The artifact must outlive this.
  explicit ArtifactPrograms(const Artifact& artifact) : artifact_(artifact) {
    const RankerSpec& ranker = *artifact.manifest.ranker;
    for (const RankerProgram& each : ranker.programs) {
      if (each.platform != "cpu") continue;
      const ProgramSource source{each.file, each.stablehlo, each.targets};
      programs_[{each.step, each.events, each.count}] =
          std::make_unique<const Program>(artifact, source, results_of(each));
    }
    if (programs_.empty()) {
      throw ArtifactError(artifact.directory.string() +
                          " has no programs for CPUs; export the ranker with platforms=('cpu',)");
    }
  }

  RuntimeArrays run(RankerStep step, size_t size, int64_t count, const Arguments& cache,
                    const std::vector<HostArray>& inputs) const override {
    Arguments arguments = artifact_.arguments();
    arguments.insert(arguments.end(), cache.begin(), cache.end());
    RuntimeArrays shared;
    for (const HostArray& each : inputs) {
      shared.push_back(share(each));
      arguments.push_back(shared.back().get());
    }
    const int64_t events = artifact_.manifest.ranker->caches[size].events;
    return programs_.at({step, events, count})->executable().run(arguments);
  }

  std::unique_ptr<const RuntimeArray> share(const HostArray& array) const override {
    return artifact_.runtime->share(array);
  }

  void compile() const {
    for (const auto& [step, program] : programs_) program->executable();
  }

 private:
  std::vector<ResultSpec> results_of(const RankerProgram& program) const {
    const Manifest& manifest = artifact_.manifest;
    const bool is_score = program.step == RankerStep::kScore;
    const auto size = std::find_if(
        manifest.ranker->caches.begin(), manifest.ranker->caches.end(),
        [&](const CacheSize& each) { return each.events == program.events; });
    std::vector<ResultSpec> results;
    for (const ArraySpec& array : is_score ? manifest.outputs : size->arrays) {
      std::vector<int64_t> shape = {is_score ? program.count : 1};
      shape.insert(shape.end(), array.shape.begin(), array.shape.end());
      results.push_back({array.dtype, std::move(shape)});
    }
    return results;
  }

  const Artifact& artifact_;
  std::map<std::tuple<RankerStep, int64_t, int64_t>, std::unique_ptr<const Program>> programs_;
};

}  // namespace

struct Ranker::State {
  Artifact artifact;
  ArtifactPrograms programs;
  RowScorer scorer;

  State(const fs::path& directory, std::shared_ptr<Runtime> runtime, const RankerOptions& options)
      : artifact(checked(directory, std::move(runtime), options.verify)),
        programs(artifact),
        scorer(artifact.manifest, programs, options.cache_bytes) {}

  static Artifact checked(const fs::path& directory, std::shared_ptr<Runtime> runtime,
                          bool verify) {
    Artifact artifact(directory, std::move(runtime), verify);
    if (artifact.manifest.ranker) return artifact;
    throw ArtifactError(directory.string() +
                        " is not a ranker with caches of histories; load it as a model");
  }
};

std::shared_ptr<const Ranker> Ranker::load(const fs::path& directory,
                                           std::shared_ptr<Runtime> runtime,
                                           const RankerOptions& options) {
  return std::shared_ptr<const Ranker>(
      new Ranker(std::make_unique<State>(directory, std::move(runtime), options)));
}

Ranker::Ranker(std::unique_ptr<State> state) : state_(std::move(state)) {}
Ranker::~Ranker() = default;

const Manifest& Ranker::manifest() const { return state_->artifact.manifest; }

Scores Ranker::predict(const Request& request) const {
  check_request(manifest(), request);
  Scores scores;
  scores.samples = request.samples;
  scores.offsets = {0};
  scores.outputs.resize(manifest().outputs.size());
  for (int64_t i = 0; i < request.samples; ++i) {
    const Row row = row_of(*manifest().ranker, manifest().batch, request, i);
    state_->scorer.score(row, scores.outputs);
    scores.offsets.push_back(scores.offsets.back() + row.num_candidates());
  }
  return scores;
}

void Ranker::warm_up() const { state_->programs.compile(); }

CacheCounts Ranker::cache_counts() const { return state_->scorer.counts(); }

}  // namespace jaxrec::serving
