// What answers requests: a model, or whatever else has a manifest.
#pragma once

#include "jaxrec/serving/manifest.h"
#include "jaxrec/serving/request.h"
#include "jaxrec/serving/scores.h"

namespace jaxrec::serving {

// Several threads may predict at once.
class Predictor {
 public:
  virtual ~Predictor() = default;

  virtual const Manifest& manifest() const = 0;

  // Returns the outputs for a request of any number of samples.
  //
  // Throws RequestError; see check_request.
  virtual Scores predict(const Request& request) const = 0;
};

}  // namespace jaxrec::serving
