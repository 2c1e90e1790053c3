// Maps from 64-bit ids to slots, for batches of ids.
#ifndef JAXREC_TIER_ID_MAP_H_
#define JAXREC_TIER_ID_MAP_H_

#include <cstdint>
#include <memory>
#include <shared_mutex>

namespace jaxrec {

constexpr int64_t kNoId = -1;
constexpr int32_t kNoSlot = -1;

// The methods do not lock: callers hold `mutex`, those that change the map alone.
class IdMap {
 public:
  virtual ~IdMap() = default;

  int64_t size() const { return size_; }
  int64_t capacity() const { return capacity_; }
  virtual int64_t num_bytes() const = 0;

  // Writes the slot of each id, and kNoSlot for the ids that are absent.
  virtual void find(const int64_t* ids, int64_t count, int32_t* slots) const = 0;

  // Adds ids, for which there must be room. Returns `count`, or the position of the first id that
  // was in the map already, that the map cannot hold or whose slot is negative; the map is then as
  // it was before.
  virtual int64_t insert(const int64_t* ids, const int32_t* slots, int64_t count) = 0;

  // Removes ids and writes the slots that they had. Returns `count`, or the position of the first
  // id that is absent; the map is then as it was before.
  virtual int64_t remove(const int64_t* ids, int64_t count, int32_t* slots) = 0;

  // Writes all ids and slots, in no particular order.
  virtual void items(int64_t* ids, int32_t* slots) const = 0;

  mutable std::shared_mutex mutex;

 protected:
  explicit IdMap(int64_t capacity) : capacity_(capacity) {}

  int64_t capacity_, size_ = 0;
};

// Makes a map of ids from 0 to `num_ids` - 1, or of any ids if it is 0: an IndexMap where the range
// is not much larger than the capacity, or else a HashMap with the seed. Throws std::bad_alloc.
std::unique_ptr<IdMap> new_id_map(int64_t capacity, uint64_t seed, int64_t num_ids);

}  // namespace jaxrec

#endif  // JAXREC_TIER_ID_MAP_H_
