#include "index_map.h"

#include <new>

namespace jaxrec {
namespace {

constexpr int64_t kAhead = 32;  // ids whose entries are asked for before they are needed

uint32_t entry_for(int32_t slot) { return static_cast<uint32_t>(slot) + 1; }

}  // namespace

IndexMap::IndexMap(int64_t capacity, int64_t num_ids)
    : IdMap(capacity),
      num_ids_(num_ids),
      entries_(static_cast<uint32_t*>(std::calloc(num_ids, sizeof(uint32_t)))) {
  if (!entries_) throw std::bad_alloc();
}

int32_t IndexMap::slot_of(int64_t id) const {
  const bool is_valid = static_cast<uint64_t>(id) < static_cast<uint64_t>(num_ids_);
  return is_valid ? static_cast<int32_t>(entries_[id] - 1) : kNoSlot;
}

void IndexMap::find(const int64_t* ids, int64_t count, int32_t* slots) const {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const uint64_t coming = static_cast<uint64_t>(ids[i + kAhead]);
      __builtin_prefetch(entries_.get() + (coming < static_cast<uint64_t>(num_ids_) ? coming : 0));
    }
    slots[i] = slot_of(ids[i]);
  }
}

int64_t IndexMap::insert(const int64_t* ids, const int32_t* slots, int64_t count) {
  int64_t added = 0;
  for (; added < count; ++added) {
    const int64_t id = ids[added];
    if (id < 0 || id >= num_ids_ || slots[added] < 0 || entries_[id] != 0) break;
    entries_[id] = entry_for(slots[added]);
  }
  if (added == count) {
    size_ += count;
  } else {
    for (int64_t i = 0; i < added; ++i) entries_[ids[i]] = 0;
  }
  return added;
}

int64_t IndexMap::remove(const int64_t* ids, int64_t count, int32_t* slots) {
  int64_t removed = 0;
  for (; removed < count; ++removed) {
    slots[removed] = slot_of(ids[removed]);
    if (slots[removed] == kNoSlot) break;
    entries_[ids[removed]] = 0;
  }
  if (removed == count) {
    size_ -= count;
  } else {
    for (int64_t i = 0; i < removed; ++i) entries_[ids[i]] = entry_for(slots[i]);
  }
  return removed;
}

void IndexMap::items(int64_t* ids, int32_t* slots) const {
  for (int64_t id = 0; id < num_ids_; ++id) {
    if (entries_[id] == 0) continue;
    *ids++ = id;
    *slots++ = slot_of(id);
  }
}

}  // namespace jaxrec
