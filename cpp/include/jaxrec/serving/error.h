// Errors of serving; their messages say which file, feature, sample and number.
#pragma once

#include <stdexcept>

namespace jaxrec::serving {

// An exported model is missing, damaged, or cannot run here.
class ArtifactError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A request is not one that the model takes.
class RequestError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// More requests wait than may; the client may try again later.
class OverloadError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace jaxrec::serving
