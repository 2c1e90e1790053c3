// A hash map from 64-bit ids to slots.
#ifndef JAXREC_TIER_HASH_MAP_H_
#define JAXREC_TIER_HASH_MAP_H_

#include <cstdlib>
#include <memory>

#include "id_map.h"

namespace jaxrec {

// One cache line, so that most lookups wait for memory once.
struct alignas(64) Bucket {
  static constexpr int kEntries = 5;
  int64_t ids[kEntries];
  int32_t slots[kEntries];
  // Number of ids of this and of earlier buckets that lie in later ones, since this one is full. A
  // lookup ends where it is 0.
  uint32_t passed;
};

// An id lies in the first bucket with room, counted from its home, which its hash names.
class HashMap final : public IdMap {
 public:
  // Throws std::bad_alloc. Homes depend on the seed: without it ids cannot be chosen to collide.
  // Ids are 0 to `num_ids` - 1, or any if it is 0.
  HashMap(int64_t capacity, uint64_t seed, int64_t num_ids = 0);

  int64_t num_bytes() const override {
    return num_buckets_ * static_cast<int64_t>(sizeof(Bucket));
  }
  void find(const int64_t* ids, int64_t count, int32_t* slots) const override;
  int64_t insert(const int64_t* ids, const int32_t* slots, int64_t count) override;
  int64_t remove(const int64_t* ids, int64_t count, int32_t* slots) override;
  void items(int64_t* ids, int32_t* slots) const override;

  // Writes the slot of each id; those that are absent, for which there must be room, get the slots
  // from `next` on. `none` is the slot of kNoId, which the map cannot hold. Returns the slot after
  // the last one that was given.
  int32_t find_or_insert(const int64_t* ids, int64_t count, int32_t next, int32_t& none,
                         int32_t* slots);

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  // Whether the map can hold an id.
  bool is_valid(int64_t id) const {
    return num_ids_ != 0 ? static_cast<uint64_t>(id) < static_cast<uint64_t>(num_ids_)
                         : id != kNoId;
  }
  Bucket* home(int64_t id) const;
  Bucket* after(Bucket* bucket) const { return bucket + 1 == end_ ? buckets_.get() : bucket + 1; }
  int64_t distance(Bucket* from, Bucket* to) const {
    return to - from + (to < from ? num_buckets_ : 0);
  }
  int32_t look_up(Bucket* bucket, int64_t id) const;
  void place(Bucket* bucket, int64_t id, int32_t slot);
  int32_t take_out(Bucket* bucket, int64_t id);
  void uncount(Bucket* first, Bucket* last);
  void empty_entry(Bucket* bucket, int entry);
  template <int kWrite, class Work>
  int64_t for_each_home(const int64_t* ids, int64_t count, const Work& work) const;

  int64_t num_ids_, num_buckets_;
  uint64_t seed_;
  std::unique_ptr<Bucket[], Free> buckets_;
  Bucket* end_;
};

}  // namespace jaxrec

#endif  // JAXREC_TIER_HASH_MAP_H_
