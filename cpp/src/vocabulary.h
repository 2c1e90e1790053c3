// Row indices of known strings and integers.
#pragma once

#include <cstdint>
#include <string_view>

#include "jaxrec/serving/column_encoding.h"
#include "npy_vector.h"

namespace jaxrec::serving {

// The vocabulary of a column; jaxrec.data.Vocabulary says which row a value has.
class Vocabulary {
 public:
  // Contents of the npy files of VocabularyFiles, which must outlive the vocabulary.
  struct Files {
    std::string_view hashes;
    std::string_view places;
    std::string_view values;
    std::string_view offsets;  // of strings
  };

  // Throws std::invalid_argument where the files do not fit each other.
  Vocabulary(const VocabularyFiles& description, const Files& files);

  bool is_integer() const { return is_integer_; }

  // Returns the row of a value; that of its hash among the rows of unknown values if it is unknown,
  // and -1 where there are none.
  //
  // Throws ArtifactError where the files are damaged.
  int64_t row(std::string_view text) const;
  int64_t row(int64_t id) const;

 private:
  template <class Matches>
  int64_t find(uint64_t hash, Matches matches) const;
  std::string_view text(size_t place) const;

  const bool is_integer_;
  const int64_t num_unknown_;
  const uint64_t seed_;
  NpyVector<uint64_t> hashes_;
  NpyVector<int32_t> places_;
  NpyVector<int64_t> ids_;
  NpyVector<char> bytes_;
  NpyVector<int64_t> offsets_;
};

}  // namespace jaxrec::serving
