// What Python calls, through ctypes. Memory is the caller's, and arguments were checked there.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "batch_ops.h"
#include "id_map.h"
#include "row_records.h"

#define JAXREC_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using jaxrec::IdMap;

using Reading = std::shared_lock<std::shared_mutex>;
using Writing = std::unique_lock<std::shared_mutex>;

constexpr int64_t kOutOfMemory = -1;
// Ids that make up for starting a thread.
constexpr int64_t kIdsOfThread = 16384;
constexpr int64_t kRecordsOfThread = 2048;

// Calls work(begin, size) for parts of a range, in threads.
template <typename Work>
void in_parts(int64_t count, int64_t of_thread, int64_t max_threads, Work work) {
  const int64_t threads = std::clamp<int64_t>(count / of_thread, 1, max_threads);
  const int64_t part = (count + threads - 1) / threads;
  std::vector<std::thread> helpers;
  int64_t begin = part;
  try {
    helpers.reserve(threads);
    for (; begin < count; begin += part) {
      helpers.emplace_back(work, begin, std::min(part, count - begin));
    }
  } catch (const std::exception&) {
    // There are no more threads: this one does the rest.
  }
  work(0, std::min(part, count));
  for (; begin < count; begin += part) work(begin, std::min(part, count - begin));
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

// Raised by each change of the functions below, so that Python refuses a library of other sources.
JAXREC_EXPORT int64_t jaxrec_tier_interface() { return 7; }

JAXREC_EXPORT IdMap* jaxrec_id_map_new(int64_t capacity, uint64_t seed, int64_t num_ids) {
  try {
    return jaxrec::new_id_map(capacity, seed, num_ids).release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

JAXREC_EXPORT void jaxrec_id_map_delete(IdMap* map) { delete map; }

JAXREC_EXPORT int64_t jaxrec_id_map_num_bytes(const IdMap* map) { return map->num_bytes(); }

JAXREC_EXPORT int64_t jaxrec_id_map_size(const IdMap* map) {
  Reading reading(map->mutex);
  return map->size();
}

JAXREC_EXPORT void jaxrec_id_map_find(const IdMap* map, const int64_t* ids, int64_t count,
                                      int32_t* slots, int64_t max_threads) {
  Reading reading(map->mutex);
  in_parts(count, kIdsOfThread, max_threads, [=](int64_t begin, int64_t size) {
    map->find(ids + begin, size, slots + begin);
  });
}

// Finds the ids of each of several maps, and those that are absent. What is written for the absent
// ids of one map follows what was written for the map before; `sizes` is [maps, 2], as of `absent`.
JAXREC_EXPORT int64_t jaxrec_id_maps_look_up(int64_t num_maps, const IdMap* const* maps,
                                             const int64_t* const* ids, const int64_t* counts,
                                             int32_t* const* slots, int64_t max_threads,
                                             uint64_t seed, int32_t* positions, int64_t* unique,
                                             int32_t* inverse, int32_t* occurrences,
                                             int64_t* sizes) {
  try {
    for (int64_t i = 0; i < num_maps; ++i, sizes += 2) {
      jaxrec_id_map_find(maps[i], ids[i], counts[i], slots[i], max_threads);
      jaxrec::absent(ids[i], slots[i], counts[i], seed, positions, unique, inverse, occurrences,
                     sizes);
      positions += sizes[0];
      inverse += sizes[0];
      unique += sizes[1];
      occurrences += sizes[1];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

// Returns `count`, the position of the id that was refused, or -1 without room.
JAXREC_EXPORT int64_t jaxrec_id_map_insert(IdMap* map, const int64_t* ids, const int32_t* slots,
                                           int64_t count) {
  Writing writing(map->mutex);
  if (count > map->capacity() - map->size()) return -1;
  return map->insert(ids, slots, count);
}

JAXREC_EXPORT int64_t jaxrec_id_map_remove(IdMap* map, const int64_t* ids, int64_t count,
                                           int32_t* slots) {
  Writing writing(map->mutex);
  return map->remove(ids, count, slots);
}

// Writes at most `room` items, and returns how many there are.
JAXREC_EXPORT int64_t jaxrec_id_map_items(const IdMap* map, int64_t room, int64_t* ids,
                                          int32_t* slots) {
  Reading reading(map->mutex);
  if (map->size() <= room) map->items(ids, slots);
  return map->size();
}

JAXREC_EXPORT int64_t jaxrec_distinct(const int64_t* ids, int64_t count, uint64_t seed,
                                      int64_t* unique, int32_t* inverse, int32_t* counts) {
  try {
    return jaxrec::distinct(ids, count, seed, unique, inverse, counts);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

JAXREC_EXPORT int64_t jaxrec_smallest(const uint64_t* keys, const uint8_t* eligible, int64_t count,
                                      int64_t k, int32_t* indices) {
  try {
    return jaxrec::smallest(keys, eligible, count, k, indices);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

JAXREC_EXPORT int64_t jaxrec_record_uses(const int32_t* slots, int64_t count, int64_t batch,
                                         uint32_t* counts, int64_t* last_use, int64_t num_slots) {
  return jaxrec::record_uses(slots, count, batch, counts, last_use, num_slots);
}

// Returns `count`, the index of a table without one of its rows, or -1.
JAXREC_EXPORT int64_t jaxrec_search(jaxrec::Search* searches, int64_t count) {
  try {
    return jaxrec::search(searches, count);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

// Returns `count`, the index of a table whose map refused an id, or -1.
JAXREC_EXPORT int64_t jaxrec_commit(const jaxrec::Change* changes, int64_t count, int64_t batch,
                                    int64_t power) {
  try {
    return jaxrec::commit(changes, count, batch, static_cast<uint8_t>(power));
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

JAXREC_EXPORT void jaxrec_find_evictions(const jaxrec::Evictions* tables, int64_t count,
                                         int32_t* which, int32_t* index, int32_t* positions,
                                         int64_t* sizes) {
  jaxrec::find_evictions(tables, count, which, index, positions, sizes);
}

JAXREC_EXPORT void jaxrec_add_evictions(const jaxrec::Evictions* tables, int64_t count) {
  jaxrec::add_evictions(tables, count);
}

JAXREC_EXPORT void jaxrec_fingerprint(const uint64_t* const* lists, const int64_t* counts,
                                      int64_t num_lists, uint64_t* sums) {
  jaxrec::fingerprint(lists, counts, num_lists, sums);
}

JAXREC_EXPORT void jaxrec_take_rows(const jaxrec::Rows* arrays, int64_t count) {
  for (int64_t i = 0; i < count; ++i) jaxrec::take_rows(arrays[i]);
}

JAXREC_EXPORT void jaxrec_put_rows(const jaxrec::NewRows* arrays, int64_t count) {
  for (int64_t i = 0; i < count; ++i) jaxrec::put_rows(arrays[i]);
}

JAXREC_EXPORT void jaxrec_copy_rows(const jaxrec::Part* parts, int64_t num_parts,
                                    const int32_t* which, const int32_t* index, int64_t width,
                                    const int32_t* places, int64_t count, uint8_t* rows) {
  jaxrec::copy_rows(parts, num_parts, which, index, width, places, count, rows);
}

JAXREC_EXPORT void jaxrec_read_records(uint8_t* base, int64_t start, int64_t stride, int64_t width,
                                       int64_t has_id, int64_t file, uint64_t* pages, int64_t seeks,
                                       const int64_t* slots, const int64_t* ids, int64_t count,
                                       int64_t* found_ids, uint8_t* found, uint8_t* out,
                                       int64_t max_threads) {
  const jaxrec::Records records{base, start, stride, width, has_id != 0};
  in_parts(count, kRecordsOfThread, max_threads, [=](int64_t begin, int64_t size) {
    jaxrec::read_records(records, static_cast<int>(file), pages, seeks != 0, slots + begin,
                         ids == nullptr ? nullptr : ids + begin, size,
                         found_ids == nullptr ? nullptr : found_ids + begin, found + begin,
                         out + begin * width);
  });
}

// Returns 0, or the error number of a record that could not be written.
JAXREC_EXPORT int64_t jaxrec_write_records(uint8_t* base, int64_t start, int64_t stride,
                                           int64_t width, int64_t has_id, int64_t file,
                                           uint64_t* pages, int64_t seeks,
                                           const int64_t* slots, const int64_t* ids, int64_t count,
                                           const uint8_t* in, int64_t max_threads) {
  const jaxrec::Records records{base, start, stride, width, has_id != 0};
  std::atomic<int64_t> error{0};
  in_parts(count, kRecordsOfThread, max_threads, [=, &error](int64_t begin, int64_t size) {
    const int64_t raised = jaxrec::write_records(records, static_cast<int>(file), pages,
                                                 seeks != 0, slots + begin, ids + begin, size,
                                                 in + begin * width);
    if (raised != 0) error = raised;
  });
  return error;
}

JAXREC_EXPORT int64_t jaxrec_erase_records(uint8_t* base, int64_t start, int64_t stride,
                                           int64_t file, const int64_t* slots, int64_t count) {
  const jaxrec::Records records{base, start, stride, 0, false};
  return jaxrec::erase_records(records, static_cast<int>(file), slots, count);
}
