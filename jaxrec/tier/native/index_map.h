// A map from a range of ids to slots: an array that the ids index.
#ifndef JAXREC_TIER_INDEX_MAP_H_
#define JAXREC_TIER_INDEX_MAP_H_

#include <cstdlib>
#include <memory>

#include "id_map.h"

namespace jaxrec {

class IndexMap final : public IdMap {
 public:
  // Throws std::bad_alloc. Ids are 0 to `num_ids` - 1.
  IndexMap(int64_t capacity, int64_t num_ids);

  int64_t num_bytes() const override { return num_ids_ * static_cast<int64_t>(sizeof(uint32_t)); }
  void find(const int64_t* ids, int64_t count, int32_t* slots) const override;
  int64_t insert(const int64_t* ids, const int32_t* slots, int64_t count) override;
  int64_t remove(const int64_t* ids, int64_t count, int32_t* slots) override;
  void items(int64_t* ids, int32_t* slots) const override;

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  int32_t slot_of(int64_t id) const;

  int64_t num_ids_;
  // For each id its slot + 1, or 0. Fresh memory is 0, and takes no room before it is written.
  std::unique_ptr<uint32_t[], Free> entries_;
};

}  // namespace jaxrec

#endif  // JAXREC_TIER_INDEX_MAP_H_
