#include "hash_map.h"

#include <algorithm>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxrec {
namespace {

// Buckets are this full when the map is. At 0.6, 0.7 and 0.8 an id takes 21, 18 and 16 bytes, and
// with 10 million ids a hit 17, 20 and 22 ns.
constexpr double kFullness = 0.7;
// Homes are asked for this many ids before they are needed: more than a core waits for at a time.
constexpr int64_t kAhead = 64;
// An id's home has arrived this many ids before its turn, and tells whether the bucket after it is
// needed, too. Without this a removal among 10 million ids takes 74 ns, not 46, and an absent id
// 34 ns, not 26.
constexpr int64_t kNear = 16;
constexpr size_t kHugePage = size_t{2} << 20;

// The finalizer of MurmurHash3: each bit of an id changes each bit of its hash.
uint64_t hash(uint64_t id, uint64_t seed) {
  id ^= seed;
  id = (id ^ id >> 33) * 0xFF51AFD7ED558CCDull;
  id = (id ^ id >> 33) * 0xC4CEB9FE1A85EC53ull;
  return id ^ id >> 33;
}

// Lookups go to random places of the memory. With pages of 4 KiB nearly each of them first misses
// in the processor's table of addresses. Pages become huge only if this is asked before they are
// first written to; a system that refuses changes nothing.
Bucket* new_buckets(int64_t count) {
  const size_t bytes = count * sizeof(Bucket);
  // Smaller ones would leave most of a huge page unused. A map of 50,000 ids takes 0.9 MB, and finds
  // an id in 2.7 ns instead of 4.4.
  const size_t alignment = bytes < kHugePage / 4 ? alignof(Bucket) : kHugePage;
  const size_t whole = (bytes + alignment - 1) / alignment * alignment;
  void* memory;
  if (posix_memalign(&memory, alignment, whole) != 0) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(memory, whole, MADV_HUGEPAGE);
#endif
  Bucket empty;
  std::fill_n(empty.ids, Bucket::kEntries, kNoId);
  std::fill_n(empty.slots, Bucket::kEntries, kNoSlot);
  empty.passed = 0;
  Bucket* buckets = static_cast<Bucket*>(memory);
  std::uninitialized_fill_n(buckets, count, empty);
  return buckets;
}

// Returns the first entry of an id in a bucket, or kEntries. It has no branch for each entry, since
// those would be mispredicted, and its comparisons do not wait for each other.
int entry_of(const Bucket& bucket, int64_t id) {
  unsigned matches = 1u << Bucket::kEntries;
  for (int i = 0; i < Bucket::kEntries; ++i) {
    matches |= static_cast<unsigned>(bucket.ids[i] == id) << i;
  }
  return __builtin_ctz(matches);
}

#if defined(__x86_64__)
#define JAXREC_AVX512 __attribute__((target("avx512f,avx512dq")))

bool has_avx512() {
  static const bool has =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0;
  return has;
}

// Writes the index of the home of each of eight ids.
JAXREC_AVX512 inline void homes_of_eight(const int64_t* ids, uint64_t seed, uint64_t num_buckets,
                                         uint64_t* homes) {
  const __m512i first = _mm512_set1_epi64(static_cast<int64_t>(0xFF51AFD7ED558CCDull));
  const __m512i second = _mm512_set1_epi64(static_cast<int64_t>(0xC4CEB9FE1A85EC53ull));
  __m512i bits = _mm512_xor_si512(_mm512_loadu_si512(ids),
                                  _mm512_set1_epi64(static_cast<int64_t>(seed)));
  bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 33)), first);
  bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 33)), second);
  bits = _mm512_srli_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 33)), 32);
  bits = _mm512_mul_epu32(bits, _mm512_set1_epi64(static_cast<int64_t>(num_buckets)));
  _mm512_store_si512(homes, _mm512_srli_epi64(bits, 32));
}

// HashMap::find of whole blocks of kAhead ids, for their first buckets; returns the number of ids.
// An id that is not in its first bucket, while others passed it, gets `unsure`. One instruction
// compares an id with a whole bucket, and eight hashes are computed at once.
JAXREC_AVX512 int64_t find_avx512(const Bucket* buckets, int64_t num_buckets, uint64_t seed,
                                  const int64_t* ids, int64_t count, int32_t unsure,
                                  int32_t* slots) {
  static_assert(sizeof(Bucket) == 64 && kAhead % 8 == 0, "a bucket is one vector");
  constexpr __mmask8 kIds = (1 << Bucket::kEntries) - 1;
  alignas(64) uint64_t homes[2][kAhead];
  const int64_t whole = count / kAhead * kAhead;
  for (int64_t i = 0; i < std::min(kAhead, whole); i += 8) {
    homes_of_eight(ids + i, seed, num_buckets, homes[0] + i);
    for (int64_t k = i; k < i + 8; ++k) __builtin_prefetch(buckets + homes[0][k]);
  }
  for (int64_t begin = 0; begin < whole; begin += kAhead) {
    const uint64_t* here = homes[begin / kAhead % 2];
    uint64_t* next = homes[1 - begin / kAhead % 2];
    const bool has_next = begin + kAhead < whole;
    for (int64_t i = 0; i < kAhead; ++i) {
      if (has_next) {
        if (i % 8 == 0) homes_of_eight(ids + begin + kAhead + i, seed, num_buckets, next + i);
        __builtin_prefetch(buckets + next[i]);
      }
      const Bucket& bucket = buckets[here[i]];
      const __mmask8 matches = _mm512_mask_cmpeq_epi64_mask(kIds, _mm512_load_si512(&bucket),
                                                            _mm512_set1_epi64(ids[begin + i]));
      if (matches != 0) {
        slots[begin + i] = bucket.slots[__builtin_ctz(matches)];
      } else {
        slots[begin + i] = bucket.passed == 0 ? kNoSlot : unsure;
      }
    }
  }
  return whole;
}
#endif

}  // namespace

HashMap::HashMap(int64_t capacity, uint64_t seed, int64_t num_ids)
    : IdMap(capacity),
      num_ids_(num_ids),
      num_buckets_(static_cast<int64_t>(capacity / (Bucket::kEntries * kFullness)) + 1),
      seed_(seed),
      buckets_(new_buckets(num_buckets_)),
      end_(buckets_.get() + num_buckets_) {}

// The upper half of the hash, scaled to the number of buckets, which is less than 2^32.
Bucket* HashMap::home(int64_t id) const {
  const uint64_t high = hash(static_cast<uint64_t>(id), seed_) >> 32;
  return buckets_.get() + (high * static_cast<uint64_t>(num_buckets_) >> 32);
}

// Calls work(i, home) for each id until a call returns false. Returns the number of calls before
// that. Asks for memory ahead.
template <int kWrite, class Work>
int64_t HashMap::for_each_home(const int64_t* ids, int64_t count, const Work& work) const {
  Bucket* homes[kAhead];
  auto ask = [&](int64_t i) {
    homes[i % kAhead] = home(ids[i]);
    __builtin_prefetch(homes[i % kAhead], kWrite);
  };
  for (int64_t i = 0; i < std::min(kAhead, count); ++i) ask(i);
  for (int64_t i = 0; i < count; ++i) {
    Bucket* bucket = homes[i % kAhead];
    if (i + kAhead < count) ask(i + kAhead);
    if (i + kNear < count) {
      // Without a branch, which would be mispredicted; the home itself is there already.
      const Bucket* near = homes[(i + kNear) % kAhead];
      __builtin_prefetch(near + (near->passed != 0), kWrite);
    }
    if (!work(i, bucket)) return i;
  }
  return count;
}

int32_t HashMap::look_up(Bucket* bucket, int64_t id) const {
  for (;; bucket = after(bucket)) {
    const int entry = entry_of(*bucket, id);
    if (entry != Bucket::kEntries) return bucket->slots[entry];
    if (bucket->passed == 0) return kNoSlot;
  }
}

void HashMap::place(Bucket* bucket, int64_t id, int32_t slot) {
  int entry;
  for (; (entry = entry_of(*bucket, kNoId)) == Bucket::kEntries; bucket = after(bucket)) {
    ++bucket->passed;
  }
  bucket->ids[entry] = id;
  bucket->slots[entry] = slot;
  ++size_;
}

int32_t HashMap::take_out(Bucket* bucket, int64_t id) {
  Bucket* const first = bucket;
  int entry;
  while ((entry = entry_of(*bucket, id)) == Bucket::kEntries) {
    if (bucket->passed == 0) return kNoSlot;
    bucket = after(bucket);
  }
  const int32_t slot = bucket->slots[entry];
  uncount(first, bucket);
  empty_entry(bucket, entry);
  --size_;
  return slot;
}

void HashMap::uncount(Bucket* first, Bucket* last) {
  for (; first != last; first = after(first)) --first->passed;
}

// Empties an entry, or rather a later one: an id that passed the full bucket comes back into the
// entry, another one into that id's entry and so on. So a map in which ids come and go stays as
// fast as a new one. Without this, absent ids take three times as long after two turnovers.
void HashMap::empty_entry(Bucket* bucket, int entry) {
  while (bucket->passed != 0) {
    Bucket* from = bucket;
    int i = Bucket::kEntries;
    while (i == Bucket::kEntries) {
      from = after(from);
      const int64_t way = distance(bucket, from);
      for (i = 0; i < Bucket::kEntries; ++i) {
        if (from->ids[i] != kNoId && distance(home(from->ids[i]), from) >= way) break;
      }
    }
    bucket->ids[entry] = from->ids[i];
    bucket->slots[entry] = from->slots[i];
    uncount(bucket, from);
    bucket = from;
    entry = i;
  }
  bucket->ids[entry] = kNoId;
  bucket->slots[entry] = kNoSlot;
}

void HashMap::find(const int64_t* ids, int64_t count, int32_t* slots) const {
#if defined(__x86_64__)
  if (has_avx512()) {
    constexpr int32_t kUnsure = -2;  // no slot is below kNoSlot
    const int64_t found =
        find_avx512(buckets_.get(), num_buckets_, seed_, ids, count, kUnsure, slots);
    for (int64_t i = 0; i < found; ++i) {
      if (slots[i] == kUnsure) slots[i] = look_up(after(home(ids[i])), ids[i]);
    }
    ids += found;
    slots += found;
    count -= found;
  }
#endif
  for_each_home<0>(ids, count, [&](int64_t i, Bucket* bucket) {
    slots[i] = look_up(bucket, ids[i]);
    return true;
  });
}

int64_t HashMap::insert(const int64_t* ids, const int32_t* slots, int64_t count) {
  const int64_t added = for_each_home<1>(ids, count, [&](int64_t i, Bucket* bucket) {
    if (!is_valid(ids[i]) || slots[i] < 0 || look_up(bucket, ids[i]) != kNoSlot) return false;
    place(bucket, ids[i], slots[i]);
    return true;
  });
  if (added < count) {
    for (int64_t i = added; i-- > 0;) take_out(home(ids[i]), ids[i]);
  }
  return added;
}

int64_t HashMap::remove(const int64_t* ids, int64_t count, int32_t* slots) {
  const int64_t removed = for_each_home<1>(ids, count, [&](int64_t i, Bucket* bucket) {
    slots[i] = ids[i] == kNoId ? kNoSlot : take_out(bucket, ids[i]);
    return slots[i] != kNoSlot;
  });
  if (removed < count) {
    for (int64_t i = removed; i-- > 0;) place(home(ids[i]), ids[i], slots[i]);
  }
  return removed;
}

int32_t HashMap::find_or_insert(const int64_t* ids, int64_t count, int32_t next, int32_t& none,
                              int32_t* slots) {
  for_each_home<1>(ids, count, [&](int64_t i, Bucket* bucket) {
    int32_t slot = ids[i] == kNoId ? none : look_up(bucket, ids[i]);
    if (slot == kNoSlot) {
      slot = next++;
      if (ids[i] == kNoId) {
        none = slot;
      } else {
        place(bucket, ids[i], slot);
      }
    }
    slots[i] = slot;
    return true;
  });
  return next;
}

void HashMap::items(int64_t* ids, int32_t* slots) const {
  for (const Bucket* bucket = buckets_.get(); bucket != end_; ++bucket) {
    for (int i = 0; i < Bucket::kEntries; ++i) {
      if (bucket->ids[i] == kNoId) continue;
      *ids++ = bucket->ids[i];
      *slots++ = bucket->slots[i];
    }
  }
}

}  // namespace jaxrec
