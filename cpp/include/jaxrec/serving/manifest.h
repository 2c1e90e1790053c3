// Content of an exported model's manifest.json; jaxrec/serve/artifact/manifest.py writes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jaxrec/serving/batch_spec.h"
#include "jaxrec/serving/column_encoding.h"
#include "jaxrec/serving/dtype.h"
#include "jaxrec/serving/ranker_spec.h"

namespace jaxrec::serving {

struct StoredFile {
  int64_t bytes = 0;
  std::vector<std::string> crc32;  // of each 64 MiB, eight hex digits
};

// An argument of the programs beside the batch, in an npy file.
struct StoredArray {
  std::string name;
  std::string file;
  DType dtype;
  std::vector<int64_t> shape;
};

struct ProgramFile {
  std::string platform;
  int64_t samples = 0;
  std::string file;
  std::vector<std::string> targets;      // functions of libjaxrec.so that it calls
  std::optional<std::string> stablehlo;  // the file that this library reads
};

struct Manifest {
  std::string jaxrec;  // version that exported the model
  std::string jax;
  BatchSpec batch;
  Structure output_structure;
  std::vector<ArraySpec> outputs;
  std::vector<StoredArray> arrays;
  std::vector<ProgramFile> programs;
  bool has_encoder = false;                // requests have raw columns
  // None: an earlier jaxrec exported the model, or C++ does not encode the columns.
  std::optional<ColumnEncoding> encoding;
  std::optional<std::string> no_encoding;  // why C++ does not encode the columns
  std::optional<RankerSpec> ranker;        // of a ranker, which has no other programs
  std::map<std::string, StoredFile> files;
};

// Reads the content of the file.
//
// Throws ArtifactError where it is not what `jaxrec export` wrote; `with_checksum` compares the
// checksum that the content has of itself, too.
Manifest parse_manifest(std::string_view text, bool with_checksum = true);

// Reads the manifest of an exported model's folder.
//
// Throws ArtifactError where there is none, or it cannot be used.
Manifest read_manifest(const std::filesystem::path& directory);

}  // namespace jaxrec::serving
