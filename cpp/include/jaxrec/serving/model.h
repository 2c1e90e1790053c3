// Exported models that predict.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "jaxrec/serving/encoder.h"
#include "jaxrec/serving/predictor.h"
#include "jaxrec/serving/runtime.h"

namespace jaxrec::serving {

// A model that `jaxrec export` wrote; several threads may predict at once.
class Model : public Predictor {
 public:
  // Maps the tables into memory, where they stay: do not change the files of a model in use.
  // `verify` compares all files with their checksums; without, only their sizes and the manifest.
  //
  // Throws ArtifactError where the folder holds no exported model, a file is missing, cut short or
  // altered, or the model cannot run here.
  static std::shared_ptr<const Model> load(const std::filesystem::path& directory,
                                           std::shared_ptr<Runtime> runtime, bool verify = true);
  ~Model() override;

  const Manifest& manifest() const override;

  Scores predict(const Request& request) const override;

  // Reads a request in JSON: raw columns where the model was exported with their encoder, and its
  // arguments otherwise (see decode_request).
  //
  // Throws RequestError; and ArtifactError where an earlier jaxrec exported the encoder, or a file
  // of it is damaged.
  Request decode(std::string_view json) const;

  // Compiles the programs of all batch sizes; otherwise each compiles at its first use.
  void warm_up() const;

 private:
  struct State;
  explicit Model(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace jaxrec::serving
