#include "program_calls.h"

#include <algorithm>
#include <iterator>
#include <regex>
#include <stdexcept>

#include "jaxrec/serving/error.h"
#include "mlir_bytecode.h"

namespace jaxrec::serving {
namespace {

using Problem = std::invalid_argument;

constexpr std::string_view kBuiltin = "builtin", kVhlo = "vhlo";

// Codes of attributes: mlir/IR/BuiltinDialectBytecode.td and stablehlo/dialect/VhloBytecode.cpp.
constexpr uint64_t kDictionary = 1, kBuiltinString = 2, kApiVersion = 5, kVhloString = 14;

// A custom call has eight properties or more, by name: api_version, backend_config,
// call_target_name ...
constexpr size_t kCallProperties = 8, kTargetProperty = 2;

constexpr std::string_view kCalls[] = {"custom_call_v1", "custom_call_v2"};
constexpr std::string_view kTargetKey = "call_target_name";

// Names that XLA turns into operations of its own; jaxrec/serve/artifact/program_file.py has them,
// and functions of JAX that its plugin alone has.
const std::regex& of_xla() {
  static const std::regex names(
      "Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|AllocateBuffer|"
      "shape_assertion|mhlo\\.(topk|erf|tan|ragged_dot)|jaxrec\\.[a-z_]+\\.v[1-9][0-9]*");
  return names;
}

bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

// Finds the targets of custom calls among all attributes.
class Targets {
 public:
  explicit Targets(const Bytecode& bytecode) : bytecode_(bytecode) {}

  // Of operations whose properties are in their section.
  void add_properties(std::set<std::string>& targets) const {
    for (const std::string_view properties : bytecode_.properties) {
      // Properties are references to attributes, but for some of no custom call.
      std::vector<uint64_t> references;
      try {
        for (BytecodeReader reader(properties); !reader.is_at_end();) {
          references.push_back(reader.number());
        }
      } catch (const Problem&) {
        // What was read before the end is what MLIR reads.
      }
      // Fewer are of no custom call, though a number among them may look like a reference to the
      // version of one: MLIR refuses a custom call without all of its properties.
      if (references.size() < kCallProperties) continue;
      const bool is_call = code_is(references[0], kVhlo, kApiVersion);
      const uint64_t target = references[kTargetProperty];
      if (is_call || is_string(target)) targets.emplace(string(target));
    }
  }

  // Of operations with attributes in a dictionary.
  void add_dictionaries(std::set<std::string>& targets) const {
    for (const Attribute& attribute : bytecode_.attributes) {
      if (attribute.dialect != kBuiltin) continue;
      BytecodeReader reader(attribute.content);
      if (reader.number() != kDictionary) continue;
      for (uint64_t left = reader.number(); left > 0; --left) {
        const uint64_t key = reader.number(), value = reader.number();
        if (string(key) == kTargetKey) targets.emplace(string(value));
      }
    }
  }

 private:
  bool code_is(uint64_t attribute, std::string_view dialect, uint64_t code) const {
    if (attribute >= bytecode_.attributes.size()) return false;
    const Attribute& each = bytecode_.attributes[attribute];
    return each.dialect == dialect && BytecodeReader(each.content).number() == code;
  }

  bool is_string(uint64_t attribute) const {
    return code_is(attribute, kVhlo, kVhloString) || code_is(attribute, kBuiltin, kBuiltinString);
  }

  std::string_view string(uint64_t attribute) const {
    if (!is_string(attribute)) throw Problem("a name of a custom call is not a string");
    BytecodeReader reader(bytecode_.attributes[attribute].content);
    reader.number();
    return bytecode_.strings[reader.index(bytecode_.strings.size())];
  }

  const Bytecode& bytecode_;
};

}  // namespace

std::set<std::string> program_calls(std::string_view bytes) {
  const Bytecode bytecode(bytes);
  std::set<std::string> calls;
  bool has_calls = false;
  for (const Operation& each : bytecode.operations) {
    if (each.dialect != kVhlo && each.dialect != kBuiltin) {
      throw Problem("it has operations of the dialect " + std::string(each.dialect));
    }
    for (const std::string_view transfer : {"infeed_", "outfeed_", "recv_", "send_"}) {
      if (starts_with(each.name, transfer)) calls.emplace(each.name);
    }
    if (!starts_with(each.name, "custom_call")) continue;
    if (std::find(std::begin(kCalls), std::end(kCalls), each.name) == std::end(kCalls)) {
      throw Problem("it has operations " + std::string(each.name) + ", of a later version");
    }
    has_calls = true;
  }
  if (!has_calls) return calls;
  const Targets targets(bytecode);
  targets.add_properties(calls);
  targets.add_dictionaries(calls);
  return calls;
}

void check_calls(const std::set<std::string>& calls, const std::vector<std::string>& declared) {
  for (const std::string& call : calls) {
    if (!std::regex_match(call, of_xla())) {
      throw ArtifactError("it calls " + call +
                          ", which jaxrec does not know and exported programs may not call; load "
                          "models of those that you trust alone");
    }
    const bool is_own = starts_with(call, "jaxrec");
    if (is_own && std::find(declared.begin(), declared.end(), call) == declared.end()) {
      throw ArtifactError("it calls " + call +
                          ", which the manifest does not list; export the model again");
    }
  }
  for (const std::string& target : declared) {
    if (calls.count(target) == 0) {
      throw ArtifactError("it does not call " + target +
                          ", which the manifest lists; export the model again");
    }
  }
}

}  // namespace jaxrec::serving
