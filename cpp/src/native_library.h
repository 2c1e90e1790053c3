// The functions of libjaxrec.so that exported programs call.
#pragma once

#include <string>

namespace jaxrec::serving {

class NativeLibrary {
 public:
  // `path` may be empty: no function is found then.
  explicit NativeLibrary(std::string path) : path_(std::move(path)) {}

  // Returns the function of a target such as "jaxrec.pooled_lookup.v1", an XLA FFI handler.
  //
  // Throws ArtifactError where there is none.
  void* handler(const std::string& target);

 private:
  const std::string path_;
  void* library_ = nullptr;
};

}  // namespace jaxrec::serving
