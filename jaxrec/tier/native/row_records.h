// Records of a memory-mapped file, each with a checksum, and rows of arrays.
#ifndef JAXREC_TIER_ROW_RECORDS_H_
#define JAXREC_TIER_ROW_RECORDS_H_

#include <cstdint>

namespace jaxrec {

// Records one after another in a file that is mapped at `base`. Each starts with its tag: 0 for a
// record that is absent, or its checksum. Then come the id, if `has_id`, the `width` bytes of the
// record, and zeros up to `stride`, a multiple of 8. The first record is at `start`, a multiple of 8.
struct Records {
  uint8_t* base;
  int64_t start, stride, width;
  bool has_id;
};

constexpr int64_t kPageBytes = 4096;

// Checksum of an id and the bytes of its record; never 0.
uint64_t record_tag(int64_t id, const uint8_t* record, int64_t width);

// Copies the records of some slots, and zeros for slots whose record is absent or damaged, or which
// are negative. `ids` are the ids of the slots; if it is null and the records have ids, `found_ids`
// gets those. `found` says whether each was there. `pages` and `seeks` are as of `write_records`;
// with `seeks`, pages that do not exist are not read.
void read_records(const Records& records, int file, uint64_t* pages, bool seeks,
                  const int64_t* slots, const int64_t* ids, int64_t count, int64_t* found_ids,
                  uint8_t* found, uint8_t* out);

// Writes records. Pages whose bit is set in `pages`, which exist in the file, are written through
// the map, as are those that `seeks` lets SEEK_DATA find; records on other pages by pwrite, which
// fails where the disk is full. Their bits are set then. All go by pwrite if `pages` is null.
// Returns 0 or the error number.
int64_t write_records(const Records& records, int file, uint64_t* pages, bool seeks,
                      const int64_t* slots, const int64_t* ids, int64_t count, const uint8_t* in);

// Places in an array of rows of `width` bytes, and room for these rows. All fields have 8 bytes, so
// that Python writes them as an array.
struct Rows {
  const uint8_t* array;
  const int32_t* places;
  int64_t width;
  int64_t count;
  uint8_t* rows;
};

// Copies the rows at the places out of the array, and zeros for places below 0.
void take_rows(const Rows& of);

// Bytes of the records of `count` rows that lie at `offset` in each record: [count, width].
struct Part {
  const uint8_t* bytes;
  int64_t width;
  int64_t offset;
};

// Records that go to distinct places of an array. All fields have 8 bytes, so that Python writes them
// as an array.
struct NewRows {
  uint8_t* array;
  int64_t width;
  const int32_t* places;
  int64_t count;
  const Part* parts;
  int64_t num_parts;
};

void put_rows(const NewRows& rows);

// Copies record index[i] of source which[i] to row places[i] of `rows`, for distinct places. Each
// source has `num_parts` of the parts, [sources, num_parts].
void copy_rows(const Part* parts, int64_t num_parts, const int32_t* which, const int32_t* index,
               int64_t width, const int32_t* places, int64_t count, uint8_t* rows);

// Sets the tags of records that have one to 0. Returns 0 or the error number.
int64_t erase_records(const Records& records, int file, const int64_t* slots, int64_t count);

}  // namespace jaxrec

#endif  // JAXREC_TIER_ROW_RECORDS_H_
