// Requests of raw columns: strings, ids of 64 bits and numbers, as before training.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "jaxrec/serving/manifest.h"
#include "jaxrec/serving/request.h"

namespace jaxrec::serving {

// Encodes raw columns as the model's training did; several threads may use it at once.
class Encoder {
 public:
  // Maps the vocabularies into memory.
  //
  // Throws ArtifactError where the manifest has no encoding of columns, it does not fit the model's
  // inputs, or a file is damaged.
  Encoder(const std::filesystem::path& directory, const Manifest& manifest);
  ~Encoder();

  // Reads a request in JSON, raw columns by name with an element for each sample:
  //
  //     {"age": [31, null], "city": ["Ulm", "Bern"], "tags": [["b"], []]}
  //
  // Other columns are ignored, as `jaxrec serve` does.
  //
  // Throws RequestError, which names the column, the sample and the value.
  Request decode(std::string_view json) const;

 private:
  struct State;
  std::unique_ptr<const State> state_;
};

}  // namespace jaxrec::serving
