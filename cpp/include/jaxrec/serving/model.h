// Exported models that predict.
#pragma once

#include <filesystem>
#include <memory>

#include "jaxrec/serving/manifest.h"
#include "jaxrec/serving/request.h"
#include "jaxrec/serving/runtime.h"
#include "jaxrec/serving/scores.h"

namespace jaxrec::serving {

// A model that `jaxrec export` wrote; several threads may predict at once.
class Model {
 public:
  // Maps the tables into memory, where they stay: do not change the files of a model in use.
  // `verify` compares all files with their checksums; without, only their sizes and the manifest.
  //
  // Throws ArtifactError where the folder holds no exported model, a file is missing, cut short or
  // altered, or the model cannot run here.
  static std::shared_ptr<const Model> load(const std::filesystem::path& directory,
                                           std::shared_ptr<Runtime> runtime, bool verify = true);
  ~Model();

  const Manifest& manifest() const;

  // Returns the outputs for a request of any number of samples.
  //
  // Throws RequestError; see check_request.
  Scores predict(const Request& request) const;

  // Compiles the programs of all batch sizes; otherwise each compiles at its first use.
  void warm_up() const;

 private:
  struct State;
  explicit Model(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace jaxrec::serving
