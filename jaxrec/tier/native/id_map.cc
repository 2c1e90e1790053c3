#include "id_map.h"

#include <new>

#include "hash_map.h"
#include "index_map.h"

namespace jaxrec {
namespace {

// An IndexMap has at most this many entries for an id that it has room for. It then takes up to 64
// bytes for each; the system gives a page of it only when an id of the page comes.
constexpr int64_t kMostEntries = 16;

}  // namespace

std::unique_ptr<IdMap> new_id_map(int64_t capacity, uint64_t seed, int64_t num_ids) {
  if (num_ids != 0 && num_ids <= kMostEntries * capacity) {
    try {
      return std::make_unique<IndexMap>(capacity, num_ids);
    } catch (const std::bad_alloc&) {
      // A HashMap may still fit.
    }
  }
  return std::make_unique<HashMap>(capacity, seed, num_ids);
}

}  // namespace jaxrec
