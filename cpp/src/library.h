// Shared libraries that are loaded while the program runs.
#pragma once

#include <dlfcn.h>

#include <string>

#include "jaxrec/serving/error.h"

namespace jaxrec::serving {

// Loads a library for the life of the process. Throws ArtifactError where it cannot be loaded.
inline void* load_library(const std::string& path) {
  // A name without a slash would be looked for elsewhere.
  const std::string place = path.find('/') == std::string::npos ? "./" + path : path;
  void* library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw ArtifactError(::dlerror());
  return library;
}

}  // namespace jaxrec::serving
