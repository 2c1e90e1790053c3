#include "native_library.h"

#include <dlfcn.h>

#include <string_view>

#include "jaxrec/serving/error.h"
#include "library.h"

namespace jaxrec::serving {
namespace {

// Returns the symbol of a target, as jaxrec/embed/kernels/native_call.py names it.
std::string symbol_of(const std::string& target) {
  constexpr std::string_view start = "jaxrec.", letters = "abcdefghijklmnopqrstuvwxyz_";
  const size_t end = target.rfind(".v");
  const bool has_form = target.compare(0, start.size(), start) == 0 && end != std::string::npos &&
                        end > start.size();
  const std::string name = has_form ? target.substr(start.size(), end - start.size()) : "";
  const std::string version = has_form ? target.substr(end + 2) : "";
  if (version.empty() || version[0] == '0' ||
      name.find_first_not_of(letters) != std::string::npos ||
      version.find_first_not_of("0123456789") != std::string::npos) {
    throw ArtifactError("it is not a function of jaxrec's native library");
  }
  const std::string symbol = "jaxrec_" + name;
  return version == "1" ? symbol : symbol + "_v" + version;
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
