#include "row_records.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace jaxrec {
namespace {

constexpr uint64_t kFactor = 0xD6E8FEB86659FD93ull;
constexpr uint64_t kStep = 0x9E3779B97F4A7C15ull;
constexpr int kLanes = 4;
constexpr int64_t kAhead = 8;  // records
constexpr int64_t kTogether = 8;  // records whose checksums are computed together

uint64_t load(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

void set(uint64_t* pages, int64_t page) {
  __atomic_fetch_or(pages + page / 64, uint64_t{1} << (page % 64), __ATOMIC_RELAXED);
}

// Starts to load bytes into the processor's caches. Nothing happens if their page is not mapped.
template <int kWrite = 0>
void fetch(const uint8_t* bytes, int64_t size) {
  for (int64_t k = 0; k < size; k += 64) __builtin_prefetch(bytes + k, kWrite);
}

// Its first line alone: each further one would wait for the same entry of the table of pages, which
// are small in a file, and the processor loads the lines that follow by itself.
void fetch(const Records& records, int64_t slot) {
  __builtin_prefetch(records.base + records.start + slot * records.stride);
}

bool is_set(const uint64_t* pages, int64_t page) {
  return __atomic_load_n(pages + page / 64, __ATOMIC_RELAXED) >> (page % 64) & 1;
}

// Whether a page exists in the file rather than in a hole. Keeps the answer in `pages`.
bool exists(int file, uint64_t* pages, int64_t page) {
  if (is_set(pages, page)) return true;
#ifdef SEEK_DATA
  if (lseek(file, page * kPageBytes, SEEK_DATA) == page * kPageBytes) {
    set(pages, page);
    return true;
  }
#endif
  return false;
}

// Whether all pages of a record exist.
bool all_exist(const Records& records, int file, uint64_t* pages, int64_t slot) {
  const int64_t offset = records.start + slot * records.stride;
  const int64_t last = (offset + records.stride - 1) / kPageBytes;
  for (int64_t page = offset / kPageBytes; page <= last; ++page) {
    if (!exists(file, pages, page)) return false;
  }
  return true;
}

int64_t write_all(int file, const uint8_t* bytes, int64_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t written = pwrite(file, bytes, size, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return ENOSPC;
    bytes += written;
    offset += written;
    size -= written;
  }
  return 0;
}

// Writes the checksums of records that lie one after another. Each is a chain of multiplications
// that wait for each other; those of several records do not.
template <int kRecords>
void record_tags(const int64_t* ids, const uint8_t* records, int64_t width, uint64_t* tags) {
  auto add = [](uint64_t& hash, uint64_t word) {
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 32;
  };
  uint64_t lanes[kRecords][kLanes];
  for (int r = 0; r < kRecords; ++r) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[r][lane] = static_cast<uint64_t>(ids[r]) * kStep + static_cast<uint64_t>(width) + lane;
    }
  }
  // Word k belongs to lane k % 4.
  int64_t at = 0;
  for (; at + 8 * kLanes <= width; at += 8 * kLanes) {
    for (int r = 0; r < kRecords; ++r) {
      for (int lane = 0; lane < kLanes; ++lane) {
        add(lanes[r][lane], load(records + r * width + at + 8 * lane));
      }
    }
  }
  // The last bytes are the low ones of a word, whose others are 0.
  for (int lane = 0; lane < kLanes; ++lane, at += 8) {
    const int64_t rest = width - at;
    if (rest <= 0) break;
    for (int r = 0; r < kRecords; ++r) {
      const uint8_t* record = records + r * width;
      uint64_t word = 0;
      if (rest >= 8) {
        word = load(record + at);
      } else if (width >= 8) {
        word = load(record + width - 8) >> 8 * (8 - rest);
      } else {
        std::memcpy(&word, record + at, rest);
      }
      add(lanes[r][lane], word);
    }
  }
  for (int r = 0; r < kRecords; ++r) {
    uint64_t hash = kStep;
    for (int lane = 0; lane < kLanes; ++lane) add(hash, lanes[r][lane]);
    tags[r] = hash == 0 ? 1 : hash;
  }
}

void tags_of(const int64_t* ids, const uint8_t* records, int64_t count, int64_t width,
             uint64_t* tags) {
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) record_tags<2>(ids + i, records + i * width, width, tags + i);
  for (; i < count; ++i) record_tags<1>(ids + i, records + i * width, width, tags + i);
}

}  // namespace

uint64_t record_tag(int64_t id, const uint8_t* record, int64_t width) {
  uint64_t tag;
  record_tags<1>(&id, record, width, &tag);
  return tag;
}

void read_records(const Records& records, int file, uint64_t* pages, bool seeks,
                  const int64_t* slots, const int64_t* ids, int64_t count, int64_t* found_ids,
                  uint8_t* found, uint8_t* out) {
  const int64_t head = records.has_id ? 16 : 8, width = records.width;
  // Copies a record, and returns its tag, or 0 if it is absent; `id` is then that of its place.
  auto copy = [&](int64_t i, int64_t& id) -> uint64_t {
    id = ids == nullptr ? slots[i] : ids[i];
    // A page that is read exists from then on in some file systems, and takes room in all caches.
    if (slots[i] < 0 || (seeks && !all_exist(records, file, pages, slots[i]))) return 0;
    const uint8_t* record = records.base + records.start + slots[i] * records.stride;
    const uint64_t tag = load(record);
    if (tag != 0 && records.has_id) {
      const int64_t stored = static_cast<int64_t>(load(record + 8));
      if (ids == nullptr) {
        found_ids[i] = id = stored;
      } else if (stored != id) {
        return 0;
      }
    }
    std::memcpy(out + i * width, record + head, width);
    return id == -1 ? 0 : tag;  // no tag is of the id -1
  };
  for (int64_t begin = 0; begin < count; begin += kTogether) {
    const int64_t size = std::min(kTogether, count - begin);
    int64_t of[kTogether] = {};
    uint64_t stored[kTogether], tags[kTogether];
    for (int64_t k = 0; k < size; ++k) {
      const int64_t coming = begin + k + kAhead;
      if (coming < count && slots[coming] >= 0) fetch(records, slots[coming]);
      stored[k] = copy(begin + k, of[k]);
    }
    tags_of(of, out + begin * width, size, width, tags);
    for (int64_t k = 0; k < size; ++k) {
      found[begin + k] = stored[k] != 0 && stored[k] == tags[k];
      if (!found[begin + k]) std::memset(out + (begin + k) * width, 0, width);
    }
  }
}

int64_t write_records(const Records& records, int file, uint64_t* pages, bool seeks,
                      const int64_t* slots, const int64_t* ids, int64_t count, const uint8_t* in) {
  const int64_t head = records.has_id ? 16 : 8, width = records.width;
  std::vector<uint8_t> whole(records.stride);
  uint64_t tags[kTogether];
  auto compose = [&](uint8_t* record, int64_t i) {
    std::memcpy(record, tags + i % kTogether, 8);
    if (records.has_id) std::memcpy(record + 8, ids + i, 8);
    std::memcpy(record + head, in + i * width, width);
  };
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count && pages != nullptr) fetch(records, slots[i + kAhead]);
    if (i % kTogether == 0) {
      tags_of(ids + i, in + i * width, std::min(kTogether, count - i), width, tags);
    }
    const int64_t offset = records.start + slots[i] * records.stride;
    const int64_t first = offset / kPageBytes, last = (offset + records.stride - 1) / kPageBytes;
    bool is_mapped = pages != nullptr;
    for (int64_t page = first; is_mapped && page <= last; ++page) {
      is_mapped = seeks ? exists(file, pages, page) : is_set(pages, page);
    }
    if (is_mapped) {
      compose(records.base + offset, i);
      continue;
    }
    compose(whole.data(), i);
    if (const int64_t error = write_all(file, whole.data(), records.stride, offset)) return error;
    for (int64_t page = first; pages != nullptr && page <= last; ++page) set(pages, page);
  }
  return 0;
}

int64_t erase_records(const Records& records, int file, const int64_t* slots, int64_t count) {
  const uint8_t zeros[8] = {};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = records.start + slots[i] * records.stride;
    if (load(records.base + offset) == 0) continue;
    if (const int64_t error = write_all(file, zeros, 8, offset)) return error;
  }
  return 0;
}

void take_rows(const Rows& of) {
  const auto [array, places, width, count, rows] = of;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count && places[i + kAhead] >= 0) {
      fetch(array + places[i + kAhead] * width, width);
    }
    if (places[i] < 0) {
      std::memset(rows + i * width, 0, width);
    } else {
      std::memcpy(rows + i * width, array + places[i] * width, width);
    }
  }
}

void put_rows(const NewRows& rows) {
  const auto [array, width, places, count, parts, num_parts] = rows;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) fetch<1>(array + places[i + kAhead] * width, width);
    uint8_t* row = array + places[i] * width;
    for (const Part* part = parts; part != parts + num_parts; ++part) {
      std::memcpy(row + part->offset, part->bytes + i * part->width, part->width);
    }
  }
}

void copy_rows(const Part* parts, int64_t num_parts, const int32_t* which, const int32_t* index,
               int64_t width, const int32_t* places, int64_t count, uint8_t* rows) {
  auto for_each_part = [=](int64_t i, auto work) {
    const Part* of_source = parts + which[i] * num_parts;
    for (const Part* part = of_source; part != of_source + num_parts; ++part) {
      work(*part, part->bytes + index[i] * part->width);
    }
  };
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      for_each_part(i + kAhead, [](const Part& part, const uint8_t* bytes) {
        fetch(bytes, part.width);
      });
    }
    uint8_t* row = rows + places[i] * width;
    for_each_part(i, [row](const Part& part, const uint8_t* bytes) {
      std::memcpy(row + part.offset, bytes, part.width);
    });
  }
}

}  // namespace jaxrec
