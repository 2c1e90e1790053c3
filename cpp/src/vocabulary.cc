#include "vocabulary.h"

#include <stdexcept>

#include "hash.h"
#include "jaxrec/serving/error.h"

namespace jaxrec::serving {
namespace {

[[noreturn]] void fail_damaged() {
  throw ArtifactError("a vocabulary is damaged: a hash has no value; export the model again");
}

}  // namespace

Vocabulary::Vocabulary(const VocabularyFiles& description, const Files& files)
    : is_integer_(description.is_integer),
      num_unknown_(description.num_unknown),
      seed_(description.seed),
      hashes_(files.hashes, "<u8"),
      places_(files.places, "<i4") {
  size_t size = 0;
  if (is_integer_) {
    ids_ = NpyVector<int64_t>(files.values, "<i8");
    size = ids_.size();
  } else {
    bytes_ = NpyVector<char>(files.values, "|u1");
    offsets_ = NpyVector<int64_t>(files.offsets, "<i8");
    if (offsets_.size() == 0) throw std::invalid_argument("it has no offsets of strings");
    size = offsets_.size() - 1;
  }
  if (hashes_.size() != size || places_.size() != size) {
    throw std::invalid_argument("it has " + std::to_string(size) + " values, but " +
                                std::to_string(hashes_.size()) + " hashes and " +
                                std::to_string(places_.size()) + " places");
  }
}

template <class Matches>
int64_t Vocabulary::find(uint64_t hash, Matches matches) const {
  size_t first = 0, last = hashes_.size();
  while (first < last) {
    const size_t middle = first + (last - first) / 2;
    if (hashes_[middle] < hash) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  if (first < hashes_.size() && hashes_[first] == hash) {
    const int32_t place = places_[first];
    if (place < 0 || static_cast<size_t>(place) >= hashes_.size()) fail_damaged();
    if (matches(static_cast<size_t>(place))) return num_unknown_ + place;
  }
  if (num_unknown_ == 0) return -1;
  return static_cast<int64_t>(hash % static_cast<uint64_t>(num_unknown_));
}

std::string_view Vocabulary::text(size_t place) const {
  const int64_t start = offsets_[place], stop = offsets_[place + 1];
  if (start < 0 || stop < start || static_cast<size_t>(stop) > bytes_.size()) fail_damaged();
  return {bytes_.data() + start, static_cast<size_t>(stop - start)};
}

int64_t Vocabulary::row(std::string_view text) const {
  return find(hash_of(text, seed_), [&](size_t place) { return this->text(place) == text; });
}

int64_t Vocabulary::row(int64_t id) const {
  const auto bits = static_cast<uint64_t>(id);
  return find(hash_of(bits, seed_), [&](size_t place) { return ids_[place] == id; });
}

}  // namespace jaxrec::serving
