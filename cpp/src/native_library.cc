#include "native_library.h"

#include <dlfcn.h>

#include <regex>

#include "jaxrec/serving/error.h"
#include "library.h"

namespace jaxrec::serving {
namespace {

// Returns the symbol of a target, as jaxrec/embed/kernels/native_call.py names it.
std::string symbol_of(const std::string& target) {
  static const std::regex form("jaxrec\\.([a-z_]{1,60})\\.v([1-9][0-9]{0,5})");
  std::smatch parts;
  if (!std::regex_match(target, parts, form)) {
    throw ArtifactError("it is no function of jaxrec's native library");
  }
  const std::string symbol = "jaxrec_" + parts[1].str();
  return parts[2] == "1" ? symbol : symbol + "_v" + parts[2].str();
}

}  // namespace

void* NativeLibrary::handler(const std::string& target) {
  const std::string symbol = symbol_of(target);
  if (path_.empty()) {
    throw ArtifactError("jaxrec's native library is missing; give the path of libjaxrec.so, which "
                        "lies in jaxrec/embed/kernels/native of an installed jaxrec");
  }
  if (library_ == nullptr) library_ = load_library(path_);
  void* handler = ::dlsym(library_, symbol.c_str());
  if (handler == nullptr) {
    throw ArtifactError(path_ + " lacks it: a later version of jaxrec exported the model; take the "
                        "library of that version");
  }
  return handler;
}

}  // namespace jaxrec::serving
