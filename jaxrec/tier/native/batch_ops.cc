#include "batch_ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "hash_map.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Compiles a function for several instruction sets, of which the loader takes the machine's widest.
// Sanitizers start too late for the function that chooses, and musl's loader calls none.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define JAXREC_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define JAXREC_WIDEST
#endif

namespace jaxrec {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int64_t kAhead = 32;  // records that are asked for before they are needed
constexpr uint64_t kLargest = std::numeric_limits<uint64_t>::max();

struct Keyed {
  uint64_t key;
  int32_t index;
};

// Sorts by key, and leaves equal keys in their order: by 11 bits at a time, from the lowest on.
void sort_by_key(std::vector<Keyed>& entries, std::vector<Keyed>& spare) {
  constexpr int kBits = 11;
  constexpr uint64_t kDigits = uint64_t{1} << kBits;
  if (entries.empty()) return;
  uint64_t least = kLargest, most = 0;
  for (const Keyed& entry : entries) {
    least = std::min(least, entry.key);
    most = std::max(most, entry.key);
  }
  spare.resize(entries.size());
  std::vector<int64_t> starts(kDigits);
  for (int shift = 0; shift < 64 && (most - least) >> shift != 0; shift += kBits) {
    auto digit = [&](const Keyed& entry) { return (entry.key - least) >> shift & (kDigits - 1); };
    std::fill(starts.begin(), starts.end(), 0);
    for (const Keyed& entry : entries) ++starts[digit(entry)];
    int64_t start = 0;
    for (int64_t& here : starts) start += std::exchange(here, start);
    for (const Keyed& entry : entries) spare[starts[digit(entry)]++] = entry;
    entries.swap(spare);
  }
}

// A key that about k of the keys do not exceed, rather more than fewer, from a sample of them.
uint64_t likely_bound(const uint64_t* keys, const uint8_t* eligible, int64_t count, int64_t k) {
  constexpr int64_t kLeast = 1024, kMost = 16384;
  const int64_t size = std::min(count / 16, kMost);
  if (size < kLeast) return kLargest;
  std::vector<uint64_t> sample;
  sample.reserve(size);
  for (uint64_t i = 1; i <= static_cast<uint64_t>(size); ++i) {
    const uint64_t at = (i * 0x9E3779B97F4A7C15ull >> 32) * static_cast<uint64_t>(count) >> 32;
    if (eligible == nullptr || eligible[at] != 0) sample.push_back(keys[at]);
  }
  const double share = static_cast<double>(size) * k / count;
  const size_t rank = static_cast<size_t>(share + 4 * std::sqrt(share) + 4);
  if (rank >= sample.size()) return kLargest;
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end());
  return sample[rank];
}

// Writes the indices from `begin` to `end` of eligible keys up to `bound`, and returns how many there
// are. `indices` has room for 16 more.
int64_t each_within(const uint64_t* keys, const uint8_t* eligible, int64_t begin, int64_t end,
                    uint64_t bound, int32_t* indices) {
  int64_t size = 0;
  for (int64_t i = begin; i < end; ++i) {
    indices[size] = static_cast<int32_t>(i);
    size += keys[i] <= bound && (eligible == nullptr || eligible[i] != 0);
  }
  return size;
}

#if defined(__x86_64__)
// As each_within, of 16 keys at once.
__attribute__((target("avx512f,avx512bw,avx512vl"))) int64_t within_avx512(
    const uint64_t* keys, const uint8_t* eligible, int64_t begin, int64_t end, uint64_t bound,
    int32_t* indices) {
  const __m512i bounds = _mm512_set1_epi64(static_cast<int64_t>(bound));
  const __m512i lanes =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t size = 0, i = begin;
  for (; i + 16 <= end; i += 16) {
    const __mmask8 low = _mm512_cmple_epu64_mask(_mm512_loadu_si512(keys + i), bounds);
    const __mmask8 high = _mm512_cmple_epu64_mask(_mm512_loadu_si512(keys + i + 8), bounds);
    __mmask16 is_within = static_cast<__mmask16>(low | high << 8);
    if (eligible != nullptr) {
      const __m128i flags = _mm_loadu_si128(reinterpret_cast<const __m128i*>(eligible + i));
      is_within &= _mm_test_epi8_mask(flags, flags);
    }
    const __m512i here = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(i)));
    _mm512_storeu_si512(indices + size, _mm512_maskz_compress_epi32(is_within, here));
    size += __builtin_popcount(is_within);
  }
  return size + each_within(keys, eligible, i, end, bound, indices + size);
}
#endif

int64_t indices_within(const uint64_t* keys, const uint8_t* eligible, int64_t begin, int64_t end,
                       uint64_t bound, int32_t* indices) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f") != 0 &&
                                 __builtin_cpu_supports("avx512bw") != 0 &&
                                 __builtin_cpu_supports("avx512vl") != 0;
  if (has_avx512) return within_avx512(keys, eligible, begin, end, bound, indices);
#endif
  return each_within(keys, eligible, begin, end, bound, indices);
}

// Returns the k smallest of the keys up to `bound`, in the order of (key, index).
std::vector<Keyed> smallest_within(const uint64_t* keys, const uint8_t* eligible, int64_t count,
                                   int64_t k, uint64_t bound) {
  const int64_t room = std::min(count, 2 * k);
  std::vector<Keyed> entries(room + kBlock), spare;
  std::vector<int32_t> within(kBlock + 16);
  int64_t size = 0;
  auto shrink = [&] {
    entries.resize(size);
    sort_by_key(entries, spare);
    size = std::min(size, k);
  };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    const int64_t some = indices_within(keys, eligible, begin, end, bound, within.data());
    for (int64_t i = 0; i < some; ++i) entries[size++] = {keys[within[i]], within[i]};
    if (size <= room || end == count) continue;
    // Of the keys to come, only those below the k-th smallest so far can be among the k smallest.
    shrink();
    if (entries[k - 1].key == 0) break;
    bound = entries[k - 1].key - 1;
    entries.resize(room + kBlock);
  }
  shrink();
  entries.resize(size);
  return entries;
}

JAXREC_WIDEST
int32_t largest_of(const int32_t* slots, int64_t count) {
  int32_t largest = kNoSlot;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, slots[i]);
  return largest;
}

// Writes whether each row of a table may be evicted, and returns the number of such rows. There is
// an element before `eligible`.
JAXREC_WIDEST
int64_t mark_eligible(const Search& table, uint8_t* eligible) {
  const int64_t *born = table.born, *last_use = table.last_use;
  const int64_t num_rows = table.num_rows, bound = table.bound;
  for (int64_t row = 0; row < num_rows; ++row) {
    eligible[row] = (born[row] >= 0) & (last_use[row] < bound);
  }
  // Without a branch, which would be mispredicted: hits below 0 go to the element before the first.
  for (int64_t i = 0; i < table.num_hits; ++i) eligible[std::max(table.hits[i], kNoSlot)] = 0;
  return std::accumulate(eligible, eligible + num_rows, int64_t{0});
}

}  // namespace

int64_t distinct(const int64_t* ids, int64_t count, uint64_t seed, int64_t* unique,
                 int32_t* inverse, int32_t* counts) {
  int32_t num_unique = 0, none = kNoSlot;
  auto map = std::make_unique<HashMap>(std::min(count, 4 * kBlock), seed);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    // A small map stays in the cache, and most batches have many repeats: it grows when it must, and
    // at once to its largest size where most ids so far came once.
    if (num_unique + size > map->capacity()) {
      const int64_t room = int64_t{2} * num_unique > begin ? count : 4 * map->capacity();
      map = std::make_unique<HashMap>(std::min(count, room), seed);
      int32_t slots[kBlock];
      for (int32_t first = 0; first < num_unique;) {
        const int64_t some = std::min<int64_t>(kBlock, num_unique - first);
        int32_t again = none;
        first = map->find_or_insert(unique + first, some, first, again, slots);
      }
    }
    const int32_t after =
        map->find_or_insert(ids + begin, size, num_unique, none, inverse + begin);
    std::fill(counts + num_unique, counts + after, 0);
    for (int64_t i = begin; i < begin + size; ++i) {
      if (inverse[i] == num_unique) unique[num_unique++] = ids[i];
      ++counts[inverse[i]];
    }
  }
  return num_unique;
}

void absent(const int64_t* ids, const int32_t* slots, int64_t count, uint64_t seed,
            int32_t* positions, int64_t* unique, int32_t* inverse, int32_t* counts,
            int64_t* sizes) {
  int64_t size = 0;
  // Without a branch, which would be mispredicted.
  for (int64_t i = 0; i < count; ++i) {
    positions[size] = static_cast<int32_t>(i);
    size += slots[i] < 0;
  }
  std::vector<int64_t> missing(size);
  for (int64_t i = 0; i < size; ++i) missing[i] = ids[positions[i]];
  sizes[0] = size;
  sizes[1] = distinct(missing.data(), size, seed, unique, inverse, counts);
}

int64_t smallest(const uint64_t* keys, const uint8_t* eligible, int64_t count, int64_t k,
                 int32_t* indices) {
  k = std::min(k, count);
  if (k == 0) return 0;
  const uint64_t bound = likely_bound(keys, eligible, count, k);
  std::vector<Keyed> entries = smallest_within(keys, eligible, count, k, bound);
  if (static_cast<int64_t>(entries.size()) < k && bound != kLargest) {
    entries = smallest_within(keys, eligible, count, k, kLargest);
  }
  for (const Keyed& entry : entries) *indices++ = entry.index;
  return static_cast<int64_t>(entries.size());
}

int64_t record_uses(const int32_t* slots, int64_t count, int64_t batch, uint32_t* counts,
                    int64_t* last_use, int64_t num_slots) {
  if (largest_of(slots, count) >= num_slots) {
    return std::find_if(slots, slots + count, [=](int32_t slot) { return slot >= num_slots; }) -
           slots;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count && slots[i + kAhead] >= 0) {
      __builtin_prefetch(counts + slots[i + kAhead], 1);
      __builtin_prefetch(last_use + slots[i + kAhead], 1);
    }
    const int32_t slot = slots[i];
    if (slot < 0) continue;
    counts[slot] += counts[slot] != std::numeric_limits<uint32_t>::max();
    last_use[slot] = batch;
  }
  return count;
}

int64_t search(Search* searches, int64_t count) {
  std::vector<uint8_t> flags;
  for (int64_t k = 0; k < count; ++k) {
    Search& table = searches[k];
    for (const Uses* uses = table.uses; uses != table.uses + table.num_uses; ++uses) {
      if (record_uses(uses->rows, uses->count, uses->batch, table.counts, table.last_use,
                      table.num_rows) < uses->count) {
        return k;
      }
    }
    if (largest_of(table.hits, table.num_hits) >= table.num_rows) return k;
    // One array for all tables, which stays in the cache.
    if (static_cast<int64_t>(flags.size()) <= table.num_rows) flags.resize(table.num_rows + 1);
    uint8_t* eligible = flags.data() + 1;
    table.num_eligible = mark_eligible(table, eligible);
    if (table.eligible != nullptr) std::copy_n(eligible, table.num_rows, table.eligible);
    table.num_found = 0;
    if (table.num_eligible < table.least) continue;
    const uint64_t* keys =
        table.keys != nullptr ? table.keys : reinterpret_cast<const uint64_t*>(table.last_use);
    table.num_found = smallest(keys, eligible, table.num_rows,
                               std::min(table.most, table.num_eligible), table.found);
  }
  return count;
}

int64_t commit(const Change* changes, int64_t count, int64_t batch, uint8_t power) {
  std::vector<int32_t> slots;
  for (int64_t k = 0; k < count; ++k) {
    const Change& change = changes[k];
    std::unique_lock<std::shared_mutex> writing(change.map->mutex);
    for (int64_t i = 0; i < change.num_victims; ++i) {
      if (i + kAhead < change.num_victims) {
        __builtin_prefetch(change.ids + change.victims[i + kAhead]);
        __builtin_prefetch(change.born + change.victims[i + kAhead], 1);
      }
      change.evicted_ids[i] = change.ids[change.victims[i]];
      change.born[change.victims[i]] = -1;
    }
    slots.resize(change.num_victims);
    if (change.map->remove(change.evicted_ids, change.num_victims, slots.data()) <
        change.num_victims) {
      return k;
    }
    if (change.num_new > change.map->capacity() - change.map->size()) return k;
    if (change.map->insert(change.new_ids, change.new_rows, change.num_new) < change.num_new) {
      return k;
    }
    writing.unlock();
    for (int64_t i = 0; i < change.num_new; ++i) {
      if (i + kAhead < change.num_new) {
        const int32_t coming = change.new_rows[i + kAhead];
        __builtin_prefetch(change.ids + coming, 1);
        __builtin_prefetch(change.born + coming, 1);
        __builtin_prefetch(change.counts + coming, 1);
      }
      const int32_t row = change.new_rows[i];
      change.ids[row] = change.new_ids[i];
      change.born[row] = batch;
      change.counts[row] = 0;
      change.powers[row] = power;
    }
    for (int64_t i = 0; i < change.num_misses; ++i) {
      change.rows[change.misses[i]] = change.absent_rows[change.inverse[i]];
    }
  }
  return count;
}

void find_evictions(const Evictions* tables, int64_t count, int32_t* which, int32_t* index,
                    int32_t* positions, int64_t* sizes) {
  for (const Evictions* table = tables; table != tables + count; ++table, ++sizes) {
    const int64_t *numbers = table->numbers, *stop = numbers + table->num_numbers;
    int64_t size = 0;
    for (int64_t i = 0; i < table->count && numbers != stop; ++i) {
      const int64_t place = table->places[i];
      if (i + kAhead < table->count && table->places[i + kAhead] >= 0) {
        __builtin_prefetch(table->last + table->places[i + kAhead]);
      }
      if (place < 0) continue;
      // Older numbers are those of evictions that have arrived; they are not erased.
      const int64_t number = table->last[place] >> 32;
      if (number < *numbers) continue;
      const int64_t* eviction = std::lower_bound(numbers, stop, number);
      if (eviction == stop || *eviction != number) continue;
      which[size] = static_cast<int32_t>(eviction - numbers);
      index[size] = static_cast<int32_t>(table->last[place]);  // the lower half
      positions[size++] = static_cast<int32_t>(i);
    }
    which += size;
    index += size;
    positions += size;
    *sizes = size;
  }
}

void add_evictions(const Evictions* tables, int64_t count) {
  for (const Evictions* table = tables; table != tables + count; ++table) {
    for (int64_t i = 0; i < table->count; ++i) {
      if (i + kAhead < table->count) {
        __builtin_prefetch(table->last + table->places[i + kAhead], 1);
      }
      table->last[table->places[i]] = (table->next << 32) + i;
    }
  }
}

void fingerprint(const uint64_t* const* lists, const int64_t* counts, int64_t num_lists,
                 uint64_t* sums) {
  for (int64_t k = 0; k < num_lists; ++k) {
    uint64_t sum = 0, mixed = 0;
    for (int64_t i = 0; i < counts[k]; ++i) {
      sum += lists[k][i];
      mixed ^= lists[k][i];
    }
    sums[2 * k] = sum;
    sums[2 * k + 1] = mixed;
  }
}

}  // namespace jaxrec
