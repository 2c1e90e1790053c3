// How raw columns become the numbers and row indices that a model takes, as in training;
// jaxrec/serve/artifact/manifest.py writes it into the manifest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace jaxrec::serving {

// A part of times, in UTC; an age counts in days.
enum class TimePart { kAge, kHour, kWeekday, kMonth };

// A column of numbers or vectors, or a part of times; see jaxrec.data.DenseColumn.
struct DenseColumn {
  enum class Transform { kStandardize, kLog1p, kLogStandardize, kLogCounts, kNone };
  enum class Missing { kMean, kZero, kError };
  std::string name;
  Transform transform = Transform::kNone;
  Missing missing = Missing::kError;
  bool is_boolean = false;           // values are true and false
  std::optional<int64_t> width;      // numbers of each vector
  std::optional<TimePart> part;
  std::optional<std::string> since;  // column of times from which an age counts; else `origin`
  int64_t origin = 0;                // microseconds since 1970

  // Number of dense features.
  size_t size() const { return static_cast<size_t>(width.value_or(1)); }
};

// The npy files of a vocabulary of `size` values; see jaxrec.data.Vocabulary.
struct VocabularyFiles {
  bool is_integer = false;             // values are int64, else strings of bytes
  int64_t num_unknown = 0;             // rows of unknown values, before those of known ones
  uint64_t seed = 0;                   // of the hashes
  std::string hashes;                  // uint64 [size], ascending
  std::string places;                  // int32 [size], the value of each hash
  std::string values;                  // int64 [size], or uint8 [bytes] of all strings
  std::optional<std::string> offsets;  // int64 [size + 1] of the strings in `values`
};

// A column of strings or ids, one for each sample or lists; see jaxrec.data.CategoricalColumn.
struct CategoricalColumn {
  enum class Encoding { kVocabulary, kHash, kIds, kModulo, kFrozen };
  std::string name;
  Encoding encoding = Encoding::kHash;
  int64_t num_embeddings = 0;  // rows of the table
  bool refuses_null = false;
  bool is_list = false;
  std::optional<VocabularyFiles> vocabulary;
  // npy file, int64 [size] raw ids of kFrozen, ascending: the first has row 1, others have row 0.
  std::optional<std::string> ids;
  bool is_boolean = false;  // values are true and false
  // Whether values of kHash and kFrozen are text, else integers; models of earlier versions do not
  // say so, and take either.
  std::optional<bool> is_text;
  std::optional<TimePart> part;
};

// Column of times of a feature that is named after it and a part: "ts" of "ts.hour".
std::string time_of(const std::string& feature);

struct ColumnEncoding {
  std::vector<DenseColumn> dense;
  std::vector<CategoricalColumn> categorical;
  std::string moments;  // npy file, float64 [dense, 2], the mean and the scale of each column

  // The files that it is made of.
  std::vector<std::string> files() const;
};

}  // namespace jaxrec::serving
